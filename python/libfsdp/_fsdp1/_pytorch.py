"""What of PyTorch's FSDP1 is private and used here."""

from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE, ActivationWrapper
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._common_utils import (
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    TrainingState,
    _is_fsdp_flattened,
    clean_tensor_name,
)
from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor
from torch.distributed.fsdp._wrap_utils import _auto_wrap

__all__ = [
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "LOW_PRECISION_HOOKS",
    "ActivationWrapper",
    "Shard",
    "ShardedTensor",
    "TrainingState",
    "auto_wrap",
    "chunk_dtensor",
    "chunk_sharded_tensor",
    "clean_tensor_name",
    "default_group",
    "gather_sharded_tensor",
    "init_from_local_shards",
    "is_fsdp_flattened",
    "without_checkpoint",
]

auto_wrap = _auto_wrap
chunk_dtensor, chunk_sharded_tensor = _create_chunk_dtensor, _create_chunk_sharded_tensor
gather_sharded_tensor = _all_gather_sharded_tensor
default_group = _get_default_group
is_fsdp_flattened = _is_fsdp_flattened


def without_checkpoint(module):
    """What is in a module, if it is a wrapper for activation checkpoints."""
    return getattr(module, _CHECKPOINT_WRAPPED_MODULE) if isinstance(module, ActivationWrapper) else module
