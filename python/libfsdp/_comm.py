"""Collectives that users bring, as the engine calls them: output, input."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def as_all_gather(comm: Callable, mesh: DeviceMesh) -> Callable[[torch.Tensor, torch.Tensor], None]:
    group = mesh.get_group(mesh.ndim - 1)
    return lambda output, input: _finish(comm(output_tensor=output, input_tensor=input, group=group, async_op=False))


def as_reduce_scatter(comm: Callable, mesh: DeviceMesh) -> Callable[[torch.Tensor, torch.Tensor], None]:
    group, op = mesh.get_group(mesh.ndim - 1), dist.ReduceOp.SUM
    return lambda output, input: _finish(
        comm(output_tensor=output, input_tensor=input, group=group, op=op, async_op=False)
    )
