"""What of PyTorch's FSDP1 is private and used here."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE, ActivationWrapper
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, FSDP_WRAPPED_MODULE, TrainingState, clean_tensor_name
from torch.distributed.fsdp._wrap_utils import _auto_wrap

__all__ = [
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "ActivationWrapper",
    "TrainingState",
    "auto_wrap",
    "clean_tensor_name",
    "default_group",
    "without_checkpoint",
]

auto_wrap = _auto_wrap
default_group = _get_default_group


def without_checkpoint(module):
    """What is in a module, if it is a wrapper for activation checkpoints."""
    return getattr(module, _CHECKPOINT_WRAPPED_MODULE) if isinstance(module, ActivationWrapper) else module
