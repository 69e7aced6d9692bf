"""What type checkers see of `fully_shard`: one module gives one, a list gives a list, and it has `.state`."""

from collections.abc import Callable
from typing import Any, Protocol, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._module import FSDPModule
from ._policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._state import FSDPState

class _FullyShard(Protocol):
    @overload
    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = ...,
        reshard_after_forward: bool | int | None = ...,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
        mp_policy: MixedPrecisionPolicy = ...,
        offload_policy: OffloadPolicy = ...,
        ignored_params: set[nn.Parameter] | None = ...,
        dp_mesh_dims: DataParallelMeshDims | None = ...,
    ) -> FSDPModule: ...
    @overload
    def __call__(
        self,
        module: list[nn.Module],
        *,
        mesh: DeviceMesh | None = ...,
        reshard_after_forward: bool | int | None = ...,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
        mp_policy: MixedPrecisionPolicy = ...,
        offload_policy: OffloadPolicy = ...,
        ignored_params: set[nn.Parameter] | None = ...,
        dp_mesh_dims: DataParallelMeshDims | None = ...,
    ) -> list[FSDPModule]: ...
    def state(self, module: nn.Module) -> FSDPState | None: ...

fully_shard: _FullyShard

def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None: ...
def share_comm_ctx(modules: list[FSDPModule]) -> None: ...
