"""A sharded parameter that is shown as this rank's part of it, one-dimensional, in the object that was there before."""

import dataclasses

import torch
from torch import nn

from .. import _C
from .._sharded import Sharded


@dataclasses.dataclass(eq=False)
class Calls:
    """Of one wrapper: how many are running, one within the other."""

    running: int = 0


def whole_of(original: nn.Parameter) -> nn.Parameter:
    """What the engine is given: it becomes the handle, with which the module's code computes."""
    return nn.Parameter(original.detach(), original.requires_grad)


class PlainSharded(Sharded):
    """The original parameter gets this rank's part as its data, so that an optimizer that has it trains it."""

    __slots__ = ("calls",)

    def __init__(self, shard: torch.Tensor, original: nn.Parameter, calls: Calls):
        super().__init__(shard)
        self.calls = calls
        self.shape, self.stride = self.handle.shape, self.handle.stride()
        if original.grad is not None and original.grad.shape != shard.shape:
            original.grad = None
        original.data = shard
        self.parameter, self.shown = original, _C.PlainShard(original)
        _C.show_in_place(shard, self.shown)
        self._show_handle()
        self._note()

    @property
    def piece(self) -> torch.Tensor:
        """What this rank has of it."""
        return self.parameter

    @property
    def listed(self) -> torch.Tensor:
        """In a call of its wrapper, the whole."""
        return self.handle if self.calls.running else self.parameter

    def _accept(self, current: nn.Parameter, name: str) -> nn.Parameter:
        if current.shape == self.shape:
            current.data = _C.piece_of(self.handle, current.detach())
        elif current.shape != self.parameter.shape:
            raise RuntimeError(
                f"Cannot writeback when the parameter shape changes\nExpects {tuple(self.shape)}, or this rank's part, "
                f"{tuple(self.parameter.shape)}, but got {tuple(current.shape)} for '{name}'"
            )
        return current
