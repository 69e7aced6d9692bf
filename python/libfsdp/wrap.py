"""PyTorch's policies for ``auto_wrap_policy``, and ``enable_wrap`` and ``wrap``, as they are."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _wrap_module_cls_individually as _wrap_module_cls_individually
from torch.distributed.fsdp.wrap import __all__ as __all__
