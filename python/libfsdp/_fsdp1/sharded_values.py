"""Tensors of which each rank has rows: ``ShardedTensor``s, or ``DTensor``s where the wrapper was given a mesh."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ._pytorch import ShardedTensor, chunk_dtensor, chunk_sharded_tensor, gather_sharded_tensor

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel


def rows_of(whole: torch.Tensor, wrapper: "FullyShardedDataParallel", offload_to_cpu: bool) -> ShardedTensor | DTensor:
    """This rank's, as ``torch.chunk`` cuts. Nothing is communicated."""
    if wrapper._device_mesh is not None:
        rows = chunk_dtensor(whole, wrapper.rank, wrapper._device_mesh)
    else:
        devices = torch.get_device_module(wrapper.compute_device).device_count()
        rows = chunk_sharded_tensor(whole, wrapper.rank, wrapper.world_size, devices, wrapper.process_group)
    return rows.cpu() if offload_to_cpu else rows


def whole_of(value: torch.Tensor, wrapper: "FullyShardedDataParallel") -> torch.Tensor:
    """Of rows, or of what is whole already. Collective for rows."""
    if isinstance(value, DTensor):
        return value.to(wrapper.compute_device).full_tensor()
    if isinstance(value, ShardedTensor):
        return gather_sharded_tensor(value, _group_of(value, wrapper.process_group), wrapper.compute_device)
    return value.detach()


def _group_of(value: ShardedTensor, expected: dist.ProcessGroup) -> dist.ProcessGroup:
    """Among whose ranks the rows are: the wrapper's, or where they were made."""
    shards = value.metadata().shards_metadata
    ranks, first = {shard.placement.rank() for shard in shards}, shards[0].shard_sizes[0]
    for group in (expected, value._process_group):
        members = dist.get_process_group_ranks(group)
        if ranks <= set(members) and first == -(-value.size()[0] // len(members)):
            return group
    raise ValueError(
        f"A ShardedTensor has rows of ranks {sorted(ranks)}, {first} at most, which is not how the ranks "
        f"{dist.get_process_group_ranks(expected)} that it is loaded for cut: let torch.distributed.checkpoint.load fill a "
        "state dict of the model that is loaded"
    )
