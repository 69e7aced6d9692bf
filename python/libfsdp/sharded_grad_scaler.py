"""PyTorch's scaler, which agrees on infinities among the ranks of its process group: with fused optimizers too."""

import torch
from torch.distributed.fsdp import sharded_grad_scaler as pytorchs

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(pytorchs.ShardedGradScaler):
    """Where an optimizer is fused, ``step`` of PyTorch's only looks at this rank's own gradients: here it unscales all."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = _one_answer(state["found_inf_per_device"])

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        self.unscale_(optimizer)
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]


def _one_answer(found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
    """0 or 1, as fused kernels ask for it, and no number of ranks and devices."""
    first, *others = found
    total = sum((found[each].to(first) for each in others), start=found[first])
    return {first: total.reshape(()).clamp(max=1)}
