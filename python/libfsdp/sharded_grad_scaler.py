"""PyTorch's scaler, as it is: it agrees on infinities among the ranks of its process group."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
