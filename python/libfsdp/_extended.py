"""Parameters that say themselves how they are gathered: tensor subclasses with ``fsdp_pre_all_gather``.

The shard is a subclass, cut by its own operators. For each gather its hooks say what is sent and what the whole is made
of. A whole that is a subclass again is made at a first gather and then kept: its inner tensors get their memory from
later gathers, and lose it in between, as a plain parameter's handle does.
"""

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from ._layout import DataParallel, Layout
from ._policy import CPUOffloadPolicy, MixedPrecisionPolicy
from ._registered import remember
from ._sharded import original_local
from ._sharded_dtensor import DTensorSharded


def is_extended(local: torch.Tensor) -> bool:
    return hasattr(local, "fsdp_pre_all_gather") or is_traceable_wrapper_subclass(local)


def stand_in(parameter: nn.Parameter) -> torch.Tensor:
    """What the engine takes for a parameter whose values it never holds itself."""
    local = original_local(parameter)
    return torch.empty(local.shape, dtype=local.dtype, device="meta", requires_grad=parameter.requires_grad)


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Those that a tensor consists of, always in the same order."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether memory of one's plain tensors can stand under the other's."""
    if type(a) is not type(b) or (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    if not is_traceable_wrapper_subclass(a):
        return True
    names = a.__tensor_flatten__()[0]
    return names == b.__tensor_flatten__()[0] and all(_alike(getattr(a, name), getattr(b, name)) for name in names)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """With memory of its own."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    names, metadata = tensor.__tensor_flatten__()
    inner = {name: _copied(getattr(tensor, name)) for name in names}
    stride = torch.empty(tensor.shape, device="meta").stride()
    return type(tensor).__tensor_unflatten__(inner, metadata, tensor.shape, stride)


def _take_over_attributes(whole: torch.Tensor, made: torch.Tensor, storages: set[int]) -> None:
    """All but the tensors that were gathered: scales, say, that are plain numbers, and tensors of the shard."""
    if not is_traceable_wrapper_subclass(whole):
        return
    names = whole.__tensor_flatten__()[0]
    for name, value in vars(made).items():
        if name not in names or _is_in(storages, value):
            whole.__dict__[name] = value
    for name in names:
        _take_over_attributes(getattr(whole, name), getattr(made, name), storages)


def _is_in(storages: set[int], tensor: torch.Tensor) -> bool:
    return not is_traceable_wrapper_subclass(tensor) and tensor.untyped_storage()._cdata in storages


def _gathered_tensors(whole: torch.Tensor, own: set[int]) -> list[torch.Tensor]:
    """What of it was gathered. A table that the whole shares with the shard keeps its memory."""
    return [tensor for tensor in _plain_tensors(whole) if not _is_in(own, tensor)]


class GatherHooks:
    """A parameter's hooks, as the engine asks for them."""

    def __init__(
        self, parameter: nn.Parameter, module: nn.Module, path: str, dim: int, parallel: DataParallel, arguments: dict
    ):
        local = original_local(parameter)
        self.path, self.dim = path, dim
        self.size, self.stride = local.shape, torch.empty(local.shape, device="meta").stride()
        self.module = weakref.ref(module)
        self.policy: MixedPrecisionPolicy = arguments["mp_policy"]
        self.offloaded = isinstance(arguments["offload_policy"], CPUOffloadPolicy)
        self.device = parallel.device
        self.mesh = parallel.shard_mesh
        self.ranks = parallel.engine.group(parallel.engine.ndim - 1)
        self.metadata: Any = None
        self.sharded: weakref.ref[Extended] | None = None
        self.made_of: weakref.ref[torch.Tensor] | None = None

    def cut(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor."""
        chunks = torch.chunk(local.detach(), self.ranks.size, self.dim)  # all that PyTorch asks of a subclass here
        is_mine = self.ranks.rank < len(chunks)
        piece = _copied(chunks[self.ranks.rank] if is_mine else chunks[0].narrow(self.dim, 0, 0))
        return piece if piece.is_meta else piece.to("cpu" if self.offloaded else self.device)

    def stored(self) -> list[torch.Tensor]:
        return list(_plain_tensors(self._local()))

    def before_gather(self) -> list[torch.Tensor]:
        local = self._local()
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            if not hasattr(local, name):
                raise NotImplementedError(
                    f"'{self.path}' is a {type(local).__name__}, a tensor subclass, and has no {name}: define both "
                    "all-gather hooks, keep it in ignored_params, or make it a plain tensor"
                )
        inputs, self.metadata = self._ask(local.to(self.device) if self.offloaded else local)
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        return [tensor.contiguous() for tensor in inputs]

    def _ask(self, local: torch.Tensor) -> tuple[Any, Any]:
        signature = inspect.signature(local.fsdp_pre_all_gather)
        if len(signature.parameters) == 1:
            return local.fsdp_pre_all_gather(self.mesh)
        if len(signature.parameters) == 5:
            return local.fsdp_pre_all_gather(self.mesh, self.size, self.stride, self.module(), self.policy)
        raise AssertionError(
            f"Invalid fsdp_pre_all_gather of '{self.path}': expects (mesh, outer_size, outer_stride, module, "
            f"mp_policy), or the older (mesh), got {signature}"
        )

    def after_gather(self, gathered: list[torch.Tensor]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        local = self._local()
        outputs = tuple(self._along_dim(tensor) for tensor in gathered)
        cast = self.policy.param_dtype if local.dtype.is_floating_point else None
        dtype = cast or local.dtype
        made, _ = local.fsdp_post_all_gather(outputs, self.metadata, dtype)
        self.metadata, self.made_of = None, weakref.ref(local)
        if made.shape != self.size:  # without the padding
            made = torch.as_strided(made, self.size, self.stride, 0)
        if type(made) in (torch.Tensor, nn.Parameter):
            return None, [made]
        sharded, own = self.sharded(), {tensor.untyped_storage()._cdata for tensor in self.stored()}
        if _alike(sharded.handle, made):
            _take_over_attributes(sharded.handle, made, own)
            return sharded.handle, _gathered_tensors(made, own)
        whole = nn.Parameter(made, sharded.parameter.requires_grad)
        sharded.take_whole(whole)
        return whole, _gathered_tensors(whole, own)

    def _along_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dim == 0 or tensor.ndim != len(self.size):
            return tensor
        return torch.cat(tensor.chunk(self.ranks.size), dim=self.dim)

    def _local(self) -> torch.Tensor:
        return self.sharded().parameter._local_tensor


class Extended(DTensorSharded):
    """A sharded parameter whose shard is a tensor subclass. ``shown.shard`` is what the engine knows it by."""

    __slots__ = ("hooks",)
    is_extended = True

    def __init__(self, shard: torch.Tensor, original: nn.Parameter, layout: Layout, hooks: GatherHooks):
        self.hooks = hooks
        hooks.sharded = weakref.ref(self)
        super().__init__(shard, original, layout)
        original._fsdp_sharded = weakref.ref(self)  # it may be tied to parameters of other units

    def _local(self, shard: torch.Tensor, original: nn.Parameter) -> torch.Tensor:
        return self.hooks.cut(original_local(original))

    def _shown(self, shard: torch.Tensor) -> _C.DTensorShard:
        return _C.ExtendedShard(self.parameter, shard)

    @property
    def needs_whole(self) -> bool:
        """Whether the first gather of these values is still to come."""
        return self.hooks.made_of is None or self.hooks.made_of() is not self.parameter._local_tensor

    def take_whole(self, whole: nn.Parameter) -> None:
        """From now on the module's code reads this one."""
        remember(whole, self, former=self.handle)
        self.handle = whole
        self._show_handle()

    def enter(self, module: nn.Module, name: str) -> None:
        self.parameter._fsdp_sharded = weakref.ref(self)
        super().enter(module, name)

    def heed_whole(self) -> None:
        """Nothing: what hooks make is not written."""

    def _follow_handle(self) -> None:
        # The next gather makes a whole of whatever dtype.
        torch.Tensor.requires_grad_(self.handle, self.parameter.requires_grad)

    def _accept(self, current: nn.Parameter, name: str) -> nn.Parameter:
        if isinstance(current, DTensor):
            return super()._accept(current, name)
        return self._as_parameter(self.hooks.cut(current), current.requires_grad)
