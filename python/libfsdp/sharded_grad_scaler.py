"""PyTorch's scaler, which agrees on infinities among the ranks of its process group: with fused optimizers too."""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import sharded_grad_scaler as pytorchs

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(pytorchs.ShardedGradScaler):
    """Ranks agree wherever gradients are looked at. PyTorch's do so in ``unscale_`` alone, which fused optimizers spare."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        GradScaler.unscale_(self, optimizer)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        answer = sum((each.to(found_inf.device) for each in found.values()), start=torch.zeros_like(found_inf))
        dist.all_reduce(answer, group=self.process_group)  # also where a rank has no gradients
        return {next(iter(found), answer.device): answer.clamp(max=1)}  # 0 or 1, as fused kernels ask for it
