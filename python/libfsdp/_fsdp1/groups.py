"""Among which ranks a wrapper shards, and among which it replicates."""

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from .. import _C
from .._mesh import group_of, group_of_one
from ._pytorch import default_group

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


@dataclasses.dataclass(frozen=True)
class Groups:
    """The process groups of a wrapper."""

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None  # of a hybrid strategy

    @staticmethod
    def of(
        strategy: ShardingStrategy, process_group: ProcessGroups, device_mesh: DeviceMesh | None, has_policy: bool
    ) -> "Groups":
        if process_group is not None and device_mesh is not None:
            raise ValueError(
                "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
            )
        if strategy in HYBRID:
            return _hybrid(strategy, process_group, device_mesh, has_policy)
        if device_mesh is not None:
            return Groups(device_mesh.get_group(mesh_dim=0), None)
        if isinstance(process_group, tuple):
            raise ValueError(f"{strategy} takes one process group, and got a tuple: HYBRID_SHARD takes (shard, replicate)")
        return Groups(process_group if process_group is not None else default_group(), None)

    def as_argument(self) -> ProcessGroups:
        return self.shard if self.replicate is None else (self.shard, self.replicate)

    def engine(self, strategy: ShardingStrategy, device: torch.device) -> _C.Mesh:
        shard = group_of(self.shard, device)
        if self.replicate is not None:
            return _C.Mesh([group_of(self.replicate, device), shard], ["replicate", "shard"], device)
        if strategy is ShardingStrategy.NO_SHARD and self.shard.size() > 1:
            return _C.Mesh([shard, group_of_one()], ["replicate", "shard"], device)
        return _C.Mesh([shard], [], device)


def _hybrid(strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, has_policy: bool) -> Groups:
    if process_group is None and device_mesh is None and not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', device_mesh)}")
        return Groups(device_mesh.get_group(mesh_dim=1), device_mesh.get_group(mesh_dim=0))
    if process_group is None:
        return _hosts_as_replicas()
    is_pair = isinstance(process_group, tuple) and len(process_group) == 2
    if not is_pair or not all(isinstance(group, dist.ProcessGroup) for group in process_group):
        raise ValueError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but got "
            f"{type(process_group)}"
        )
    return Groups(*process_group)


def _hosts_as_replicas() -> Groups:
    """Shards among the ranks of a host; hosts have as many each, one after another."""
    world = dist.get_world_size()
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else world
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    if world % per_host != 0:
        raise ValueError(
            f"HYBRID_SHARD without process groups shards among the {per_host} ranks of a host, which do not divide the "
            f"{world} ranks of the job: pass process_group=(shard, replicate) or a device_mesh"
        )
    own, rank = None, dist.get_rank()
    shard, _ = dist.new_subgroups(per_host)
    for first in range(per_host):
        group = dist.new_group(list(range(first, world, per_host)))
        own = group if rank % per_host == first else own
    return Groups(shard, own)
