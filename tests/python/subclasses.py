"""Tensor subclasses with all-gather hooks, as users write them."""

import math

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


class Wrapper(torch.Tensor):
    """Around the tensors that ``inner`` names."""

    inner = ("data_",)

    @staticmethod
    def __new__(cls, *tensors, **others):
        first = tensors[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=cls.shown_dtype(first), device=first.device
        )

    def __init__(self, *tensors):
        for name, tensor in zip(self.inner, tensors, strict=True):
            setattr(self, name, tensor)

    @staticmethod
    def shown_dtype(first):
        return first.dtype

    def __tensor_flatten__(self):
        return list(self.inner), None

    @classmethod
    def __tensor_unflatten__(cls, tensors, _meta, _size, _stride):
        return cls(*(tensors[name] for name in cls.inner))

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(repr(getattr(self, name)) for name in self.inner)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        results = []
        for name in cls.inner:
            arguments, keywords = tree_map_only(cls, lambda x, name=name: getattr(x, name), (args, kwargs))
            results.append(func(*arguments, **keywords))
        flat, structure = tree_flatten(results[0])
        others = [tree_flatten(result)[0] for result in results]
        wrapped = [
            cls(*(other[i] for other in others)) if isinstance(item, torch.Tensor) else item
            for i, item in enumerate(flat)
        ]
        return return_and_correct_aliasing(func, args, kwargs, tree_unflatten(wrapped, structure))


class Pair(Wrapper):
    """Two tensors, both of which are sent."""

    inner = ("a", "b")

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1 and isinstance(module, nn.Module) and math.prod(outer_size[1:]) == outer_stride[0]
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        a, b = outputs
        if out is not None:
            if a.dtype != param_dtype:
                out.a.copy_(a), out.b.copy_(b)
            return None
        return Pair(a, b).to(param_dtype), (a, b)


class OlderPair(Pair):
    """With the older of the two signatures."""

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        return (self.a, self.b), "sent"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "sent"
        if out is None:
            return OlderPair(*outputs), outputs


class HalfOnTheWire(Wrapper):
    """Sent as bfloat16; the whole is a plain tensor."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        sent = torch.zeros(math.ceil(outer_size[0] / mesh.size()), *outer_size[1:], dtype=torch.bfloat16)
        sent[: self.shape[0]].copy_(self.data_)
        return (sent,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (sent,) = outputs
        assert sent.dtype == torch.bfloat16
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(sent)
            return None
        whole = sent.to(param_dtype)
        return whole, (sent, whole)


class Scaled(Wrapper):
    """A whole in 8 bits with a scale for each row."""

    inner = ("data_", "scale")

    @staticmethod
    def shown_dtype(first):
        return torch.float32

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(*(func(getattr(args[0], name)) for name in cls.inner))
        values = lambda x: x.data_.float() * x.scale  # noqa: E731
        return func(*tree_map_only(cls, values, args), **tree_map_only(cls, values, kwargs or {}))


class ScaledOnTheWire(Wrapper):
    """Sent in 8 bits with a scale for each row, and used like that."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = math.ceil(outer_size[0] / mesh.size())
        values = torch.zeros(rows, *outer_size[1:])
        values[: self.shape[0]].copy_(self.data_)
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-6) / 400
        return ((values / scale).to(torch.float8_e4m3fn), scale), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        data, scale = outputs
        if out is not None:
            out.scale = scale
            return None
        return Scaled(data, scale), outputs


class Coded(Wrapper):
    """Frozen numbers of a table, as 4-bit weights are stored: each is sent as its place there. Can be split, and read."""

    inner = ("codes", "table")

    @staticmethod
    def shown_dtype(first):
        return torch.float32

    @classmethod
    def of(cls, values, table):
        return cls((values.detach().unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8), table)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        aten = torch.ops.aten
        if func is aten.split.Tensor:
            return [cls(codes, args[0].table) for codes in func(args[0].codes, *args[1:], **(kwargs or {}))]
        if func is aten.detach.default:
            return cls(args[0].codes.detach(), args[0].table.detach())
        if func not in (aten.t.default, aten.mm.default, aten.addmm.default):
            raise NotImplementedError(f"{cls.__name__} has no {func}")
        values = lambda x: x.table[x.codes.long()]  # noqa: E731
        return func(*tree_map_only(cls, values, args), **tree_map_only(cls, values, kwargs or {}))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.codes,), self.table

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return Coded(outputs[0], metadata), outputs


def wrapped(model, kind):
    """The weights of all linear modules, wrapped."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            copies = (module.weight.detach().clone() for _ in kind.inner)
            module.weight = nn.Parameter(kind(*copies))
    return model


def plain(tensor):
    """The tensors that one consists of."""
    return [getattr(tensor, name) for name in tensor.inner] if isinstance(tensor, Wrapper) else [tensor]
