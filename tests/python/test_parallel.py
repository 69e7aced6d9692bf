"""Together with tensor parallelism, and with parameters that are DTensors on one mesh for everything."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from harness import on_ranks
from libfsdp import DataParallelMeshDims, fully_shard
from subjects import seeded, whole


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def batch_of(mesh, step):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(4 * mesh["dp"].size(), 8, generator=generator)
    rank = mesh["dp"].get_local_rank()
    return rows, rows[rank * 4 : (rank + 1) * 4]


def check_as_unsharded(model, mesh, local_batch=lambda x: x):
    reference = seeded(MLP)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        rows, mine = batch_of(mesh, step)
        whole(model(local_batch(mine))).pow(2).mean().backward()
        reference(rows).pow(2).mean().backward()
        for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=lambda m: f"{step} {name}: {m}")
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(p), q.detach())


@on_ranks(4)
def test_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(seeded(MLP), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    placements = {name: p.placements for name, p in model.named_parameters()}
    assert placements == {
        "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
    }
    assert all(p.device_mesh.mesh_dim_names == ("dp", "tp") for p in model.parameters())
    assert isinstance(model.up.weight, DTensor) and model.up.weight.device_mesh == mesh["tp"]
    check_as_unsharded(model, mesh)


def on_whole_mesh(mesh, rest):
    model = seeded(MLP)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            placements = [Replicate() if dim != "tp" else rest for dim in mesh.mesh_dim_names]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


@on_ranks(2, 4, comm=("shm",))
def test_one_mesh_for_everything():
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for dims, placement in [(DataParallelMeshDims(shard="dp"), Shard(0)), (DataParallelMeshDims(replicate="dp"), None)]:
        model = on_whole_mesh(mesh, None)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert next(model.parameters()).placements == (placement or Replicate(),)
        assert next(model.parameters()).device_mesh == mesh
        check_as_unsharded(model, mesh)


@on_ranks(2, comm=("shm",))
def test_wrong_meshes():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match="must be DTensors"):
        fully_shard(MLP(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="not found in mesh.mesh_dim_names"):
        fully_shard(MLP(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="missing"))
    with pytest.raises(ValueError, match="same mesh"):
        fully_shard(on_whole_mesh(mesh["dp"], None), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(NotImplementedError, match="reshard_after_forward as int"):
        fully_shard(on_whole_mesh(mesh, Replicate()), mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    model = MLP()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match="Expected Replicate"):
        fully_shard(model.up, mesh=mesh, dp_mesh_dims=dims)
    assert libfsdp.DataParallelMeshDims is DataParallelMeshDims
