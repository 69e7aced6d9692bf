"""A sharded parameter that is shown as a DTensor around this rank's shard: what ``fully_shard`` registers."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from ._layout import Layout
from ._registered import sharded_behind
from ._sharded import OnTheWhole, Sharded


class OnTheWholeOfADTensor(OnTheWhole):
    """Also what a DTensor has, which PyTorch's programs find there."""

    of_dtensors = ("to_local", "full_tensor", "redistribute", "data_ptr", "device_mesh", "placements", "_local_tensor")

    def divert(self) -> None:
        super().divert()
        sharded, shadow = self.sharded(), self.shadow()
        if not isinstance(shadow, DTensor):
            for name in ("to_local", "full_tensor", "redistribute", "data_ptr"):
                setattr(shadow, name, getattr(self, name))
            shadow.device_mesh, shadow.placements = sharded.mesh, sharded.placements
        sharded.show_local()

    def attributes(self) -> tuple[str, ...]:
        return self.methods + (() if isinstance(self.shadow(), DTensor) else self.of_dtensors)

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.sharded().parameter.to_local(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.sharded().parameter.full_tensor(*args, **kwargs)

    def data_ptr(self) -> int:
        """Programs that ask whether two tensors are one expect this error of tensors that have no address."""
        try:
            return torch.Tensor.data_ptr(self.shadow())
        except RuntimeError as error:
            raise NotImplementedError(str(error)) from None

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        return self.sharded().parameter.redistribute(*args, **kwargs)


class FilledLater(nn.Parameter):
    """The handle of a parameter that had no values when it was sharded. What loaders note on the registered one, which they
    fill (transformers: that it needs no initialization), is found on what the module's code reads."""

    def __getattr__(self, name: str) -> Any:
        sharded = sharded_behind(self)
        if sharded is None or name not in vars(sharded.parameter):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return vars(sharded.parameter)[name]


class DTensorSharded(Sharded):
    """Registered is a DTensor; what was one before is read as one."""

    __slots__ = ("around", "layout", "mesh", "placements")

    def __init__(self, shard: torch.Tensor, original: nn.Parameter, layout: Layout):
        super().__init__(shard)
        self.layout = layout
        self.mesh, self.placements, self.around = layout.mesh, layout.placements, layout.around
        like = original if isinstance(original, DTensor) else self.handle
        self.shape, self.stride = like.shape, like.stride()
        requires_grad = original.requires_grad
        self.parameter = self._as_parameter(self._local(shard, original), requires_grad)
        self._take_attributes(original)
        self.shown = self._shown(shard)
        _C.show_as(shard, self.shown)
        if self.handle is not original:  # a new tensor, or what a DTensor wraps
            self.handle._is_param = True
            self.handle.requires_grad_(requires_grad)
            original._fsdp_handle = self.handle  # it may be tied to parameters of other units
        if shard.is_meta and type(self.handle) is nn.Parameter:
            self.handle.__class__ = FilledLater
        self._show_handle()
        OnTheWhole(self).keep_hooks(original)
        self._note()

    def _take_attributes(self, original: torch.Tensor) -> None:
        """What users have set on it; other tensor subclasses have their memory there."""
        if isinstance(original, DTensor) or not is_traceable_wrapper_subclass(original):
            for name, value in vars(original).items():
                if name not in OnTheWhole.methods and not hasattr(self.parameter, name):
                    setattr(self.parameter, name, value)

    def _follow_handle(self) -> None:
        """PyTorch's ``to()`` puts another tensor behind a ``DTensor``, and leaves behind what users had set there."""
        super()._follow_handle()
        self._take_attributes(self.handle)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (present := getattr(self.parameter, hooks)) is not None:
                setattr(self.parameter, hooks, present)

    def _local(self, shard: torch.Tensor, original: nn.Parameter) -> torch.Tensor:
        return shard

    def _shown(self, shard: torch.Tensor) -> _C.DTensorShard:
        return _C.DTensorShard(self.parameter)

    def _as_parameter(self, shard: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        meta = TensorMeta(self.shape, self.stride, shard.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        parameter = nn.Parameter(DTensor(shard.detach(), spec, requires_grad=False), requires_grad)
        parameter._local_tensor = shard  # itself: where its memory moves, the parameter follows
        return parameter

    def unsharded_on_meta(self) -> nn.Parameter:
        """A parameter as the one that was sharded."""
        whole = torch.empty(self.handle.shape, dtype=self.parameter.dtype, device="meta")
        return nn.Parameter(self._around(whole), self.parameter.requires_grad)

    def _show_handle(self) -> None:
        self.shadow = self._around_handle()
        OnTheWholeOfADTensor(self).divert()

    def show_local(self) -> None:
        if not isinstance(self.shadow, DTensor):
            self.shadow._local_tensor = self.parameter._local_tensor

    def enter(self, module: nn.Module, name: str) -> None:
        super().enter(module, name)
        self.show_local()

    def _around_handle(self) -> torch.Tensor:
        """What the module's code reads: the handle, or a DTensor through which gradients reach it."""
        if self.around is None:
            return self.handle
        with torch.enable_grad():
            shadow = self._around(self.handle)
        shadow._is_param = True
        return shadow

    def _around(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.around is None else self.around.wrap(whole, self.shape, self.stride)

    def as_given(self, whole: torch.Tensor) -> nn.Parameter:
        """In the memory of a plain tensor, a parameter as the one that was sharded."""
        if self.around is None:
            return whole
        parameter = nn.Parameter(self._around(whole.detach()), whole.requires_grad)
        if whole.grad is not None:
            parameter.grad = self._around(whole.grad)
        return parameter

    def plain_of(self, given: torch.Tensor, name: str) -> torch.Tensor:
        """The other way round."""
        if self.around is None:
            return given
        mesh, placements = self.around.mesh, self.around.placements
        if not isinstance(given, DTensor):
            raise ValueError(
                f"summon_full_params: '{name}' is a DTensor, placed as {placements} on {mesh}, and a plain tensor was put in its "
                "place: give it a DTensor that lies as it does"
            )
        if (given.shape, given.device_mesh, tuple(given.placements)) != (self.shape, mesh, tuple(placements)):
            raise ValueError(
                f"summon_full_params: '{name}' is a DTensor of shape {tuple(self.shape)}, placed as {placements} on {mesh}, and was "
                f"given one of shape {tuple(given.shape)}, placed as {given.placements} on {given.device_mesh}: give it one that "
                "lies as it does"
            )
        return given._local_tensor

    def _accept(self, current: nn.Parameter, name: str) -> nn.Parameter:
        if current.shape != self.shape:
            raise ValueError(
                f"the sharded parameter '{name}' has shape {tuple(self.shape)}, and a tensor of shape "
                f"{tuple(current.shape)} was put in its place: put a whole one there, or a DTensor of that shape"
            )
        if not isinstance(current, DTensor):
            return self._as_parameter(_C.piece_of(self.handle, current.detach()), current.requires_grad)
        if current.device_mesh != self.mesh or tuple(current.placements) != self.placements:
            raise ValueError(
                f"the sharded parameter '{name}' lies on {self.mesh} as {self.placements}, and a DTensor on "
                f"{current.device_mesh} as {tuple(current.placements)} was put in its place: redistribute it first"
            )
        return current
