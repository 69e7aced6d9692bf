"""Fully sharded data parallel training: ``fully_shard`` and ``FullyShardedDataParallel`` as PyTorch has them, on a C++
engine.

Replace ``from torch.distributed.fsdp import`` by ``from libfsdp import`` and keep the rest.
"""

from ._torch import check_torch, let_higher_order_operators_through

check_torch()
let_higher_order_operators_through()

from torch.distributed.fsdp import (  # noqa: E402
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from . import wrap  # noqa: E402, F401 (an attribute, as PyTorch's is)
from ._C import CommError, Error, SavedCheckpoint, __version__  # noqa: E402
from ._checkpoint import (  # noqa: E402
    LoadedState,
    PendingSave,
    export_safetensors,
    import_safetensors,
    latest,
    load,
    save,
    save_async,
)
from ._fsdp1.module import FullyShardedDataParallel  # noqa: E402
from ._fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx  # noqa: E402
from ._mesh import use_shared_memory  # noqa: E402
from ._module import FSDPModule, UnshardHandle  # noqa: E402
from ._policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy  # noqa: E402
from ._tools import clip_grad_norm_, describe, summon_full_params, trace  # noqa: E402

__all__ = [
    "BackwardPrefetch",
    "clip_grad_norm_",
    "CommError",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "describe",
    "Error",
    "export_safetensors",
    "FlatParameter",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "fully_shard",
    "FullyShardedDataParallel",
    "import_safetensors",
    "latest",
    "load",
    "LoadedState",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PendingSave",
    "register_fsdp_forward_method",
    "save",
    "save_async",
    "SavedCheckpoint",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "share_comm_ctx",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "summon_full_params",
    "trace",
    "UnshardHandle",
    "use_shared_memory",
    "__version__",
]
