"""A module's registered parameters, where some are sharded."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from ._sharded import Sharded


class Registered(dict):
    """Takes the place of ``module._parameters``. Where a parameter is exchanged for a while, as
    ``torch.func.functional_call`` does, what the module's code reads is exchanged with it."""

    __slots__ = ("module", "sharded")

    def __init__(self, module: nn.Module):
        super().__init__(module._parameters)
        self.module = weakref.ref(module)
        self.sharded: dict[str, Sharded] = {}

    @staticmethod
    def of(module: nn.Module) -> "Registered":
        if not isinstance(module._parameters, Registered):
            module.__dict__["_parameters"] = Registered(module)
        return module._parameters

    def enter(self, name: str, sharded: "Sharded") -> None:
        self.sharded[name] = sharded
        dict.__setitem__(self, name, sharded.parameter)
        self.module().__dict__[name] = sharded.shadow

    def exchange_quietly(self, name: str, tensor: torch.Tensor) -> None:
        """What the module's code reads stays."""
        dict.__setitem__(self, name, tensor)

    def is_exchanged(self, name: str) -> bool:
        """For a while: an assignment to the module's attribute, which is for good, takes the shadow away."""
        return self[name] is not self.sharded[name].parameter and name in self.module().__dict__

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        dict.__setitem__(self, name, tensor)
        sharded, seen = self.sharded.get(name), self.module().__dict__
        if sharded is not None and name in seen:
            seen[name] = sharded.shadow if tensor is sharded.parameter else _whole(tensor, name, sharded)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        if name in self.sharded:
            self.module().__dict__.pop(name, None)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self),)


def _whole(tensor: torch.Tensor | None, name: str, sharded: "Sharded") -> torch.Tensor | None:
    if not isinstance(tensor, DTensor) or isinstance(sharded.shadow, DTensor):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"functional_call was given a sharded tensor that requires a gradient for '{name}': give the whole one, "
            "tensor.full_tensor(), whose gradient is then this rank's own"
        )
    return tensor.full_tensor()
