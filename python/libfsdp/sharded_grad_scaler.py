"""PyTorch's scaler, which agrees on infinities among the ranks of its process group: with fused optimizers too."""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import sharded_grad_scaler as pytorchs

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(pytorchs.ShardedGradScaler):
    """What ``step`` asks of PyTorch's where an optimizer is fused, is whether this rank's own gradients are finite."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = _one_answer(state["found_inf_per_device"])

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _one_answer(found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
    """0 or 1, as fused kernels ask for it, and no number of ranks and devices."""
    first, *others = found
    total = sum((found[each].to(first) for each in others), start=found[first])
    return {first: total.reshape(()).clamp(max=1)}
