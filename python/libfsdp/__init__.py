"""Fully sharded data parallel training: ``fully_shard`` as PyTorch has it, on a C++ engine.

Replace ``from torch.distributed.fsdp import fully_shard`` by ``from libfsdp import fully_shard`` and keep the rest.
"""

from ._torch import check_torch

check_torch()

from ._C import CommError, Error, __version__  # noqa: E402
from ._fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx  # noqa: E402
from ._mesh import use_shared_memory  # noqa: E402
from ._module import FSDPModule, UnshardHandle  # noqa: E402
from ._policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy  # noqa: E402
from ._tools import clip_grad_norm_, describe, summon_full_params, trace  # noqa: E402

__all__ = [
    "CommError",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Error",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "__version__",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "summon_full_params",
    "trace",
    "use_shared_memory",
]
