"""Meshes of one and two dimensions, slices of larger ones, groups that users made."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import libfsdp
from harness import on_ranks
from libfsdp import fully_shard
from subjects import (
    check_same,
    check_training,
    loss_of,
    mine,
    mlp,
    needs_mesh_of_a_parameter,
    reference_backward,
    rows,
    seeded,
    whole,
)


def sharded(mesh, **options):
    model = seeded(mlp)
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=mesh, **options)
    return model


@on_ranks(4)
def test_hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, dict(reshard_after_forward=False)):
        model = sharded(mesh, **options)
        assert next(model.parameters()).placements == (Replicate(), Shard(0))
        assert next(model.parameters()).device_mesh is mesh
        check_training(model, seeded(mlp), loss_of, (5,), exact=False)


@on_ranks(4)
def test_hybrid_all_reduce_put_off():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(mesh), seeded(mlp)
    model.set_requires_all_reduce(False)
    loss_of(model, mine(rows(0, 5))).backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_all_reduce(True)
    loss_of(model, mine(rows(1, 5))).backward()
    for step in (0, 1):
        for part in rows(step, 5).split(4):
            loss_of(reference, part).backward()
    for p in reference.parameters():
        p.grad.div_(4)
    check_same(model, reference, exact=False, what="gradients")
    with pytest.raises(ValueError, match="stream cannot be set"):
        model.set_all_reduce_hook(lambda tensor: None, stream=torch.Stream("cpu"))


@on_ranks(4, comm=("shm",))
def test_slices_of_a_larger_mesh():
    world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "other", "shard"))
    model = sharded(world["replicate", "shard"])
    check_training(model, seeded(mlp), loss_of, (5,), exact=False, steps=2)
    alone = sharded(world["shard"])
    assert next(alone.parameters()).placements == (Shard(0),)
    assert next(alone.parameters()).device_mesh.size() == 2
    loss_of(alone, mine(rows(0, 5))).backward()


@on_ranks(2)
def test_from_group():
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu")
    check_training(sharded(mesh), seeded(mlp), loss_of, (5,), exact=True, steps=2)


class WrittenInPython(dist.ProcessGroup):
    """A user's own, without most of PyTorch's collectives."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allgather(self, *arguments):
        return self.gloo.allgather(*arguments)

    def allreduce(self, *arguments):
        return self.gloo.allreduce(*arguments)

    def getBackendName(self):
        return "written_in_python"

    def setGroupName(self, name):
        self.name = name

    def getGroupName(self):
        return self.name

    def setGroupDesc(self, description):
        pass


@on_ranks(2)
def test_a_process_group_written_in_python():
    dist.Backend.register_backend("written_in_python", WrittenInPython, devices=["cpu"])
    mesh = DeviceMesh.from_group(dist.new_group([0, 1], backend="written_in_python"), "cpu")
    model, reference = sharded(mesh), seeded(mlp)
    ours, theirs = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (model, reference))
    for step in range(3):
        batch = rows(step, 5)
        loss_of(model, mine(batch)).backward()
        reference_backward(reference, loss_of, batch)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    with libfsdp.summon_full_params(model):  # DTensor's full_tensor() needs a group that PyTorch made
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.detach(), theirs.detach())


@on_ranks(4, comm=("shm",))
def test_hybrid_from_groups():
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    mesh = DeviceMesh.from_group(
        [replicas, shards], "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard")
    )
    check_training(sharded(mesh), seeded(mlp), loss_of, (5,), exact=False, steps=2)


@needs_mesh_of_a_parameter
@on_ranks(4, comm=("shm",))
def test_a_mesh_for_some_parameters():
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flat = init_device_mesh("cpu", (4,))
    inner = FSDPMeshInfo(world["inner"], shard_mesh_dim=0)
    model, reference = seeded(mlp), seeded(mlp)
    place = lambda p: ShardPlacementResult(Shard(0), inner) if p.ndim == 1 else None  # noqa: E731
    fully_shard(model, mesh=flat, shard_placement_fn=place)
    assert model[0]._parameters["weight"].device_mesh == flat
    assert model[0]._parameters["bias"].device_mesh == world["inner"]
    loss_of(model, mine(rows(0, 5))).backward()
    parts = [torch.autograd.grad(loss_of(reference, part), reference[0].bias)[0] for part in rows(0, 5).split(4)]
    own = parts[:2] if dist.get_rank() < 2 else parts[2:]
    torch.testing.assert_close(whole(model[0]._parameters["bias"].grad), sum(own) / 2)


@needs_mesh_of_a_parameter
@pytest.mark.parametrize("reshard", [True, 2])
@on_ranks(4, comm=("shm",))
def test_hybrid_meshes_for_some_parameters(reshard):
    """One for biases, which all ranks share in the end, and one for weights, which are cut in another order."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = HSDPMeshInfo(hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)
    model = seeded(mlp)
    place = lambda p: ShardPlacementResult(Shard(0), own) if p.ndim == 1 else Shard(p.ndim - 1)  # noqa: E731
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=wide, shard_placement_fn=place, reshard_after_forward=reshard)
    weight, bias = model[0]._parameters["weight"], model[0]._parameters["bias"]
    assert (weight.device_mesh, weight.placements) == (wide, (Replicate(), Shard(1)))
    assert (bias.device_mesh, bias.placements) == (hybrid, (Replicate(), Shard(0)))
    check_training(model, seeded(mlp), loss_of, (5,), exact=False, steps=2)


@needs_mesh_of_a_parameter
@on_ranks(4, comm=("shm",))
def test_collectives_for_one_mesh_where_there_are_several():
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = FSDPMeshInfo(mesh["inner"], shard_mesh_dim=0)
    sizes = []

    def gather(output_tensor, input_tensor, group, async_op):
        sizes.append(group.size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    mixed, same = seeded(mlp), seeded(mlp)
    fully_shard(mixed, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), inner) if p.ndim == 1 else None)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(ValueError, match=f"{name} is for parameters on one mesh"):
            getattr(mixed, name)(gather)
    fully_shard(same, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), inner))
    same.set_custom_all_gather(gather)
    x = mine(rows(0, 5))
    assert torch.equal(same(x), seeded(mlp)(x)) and set(sizes) == {2}


@on_ranks(2, comm=("shm",))
def test_shared_memory_takes_over_unless_told_otherwise():
    import os

    from libfsdp import _C, _mesh

    mesh = init_device_mesh("cpu", (2,))
    name = lambda: _mesh.engine_mesh(mesh).group(0).name  # noqa: E731
    assert name() == "shm"
    libfsdp.use_shared_memory(False)
    assert name() == "gloo"
    libfsdp.use_shared_memory(True)
    os.environ["FSDP_SHM"] = "0"
    assert name() == "gloo"
    assert _C.Mesh is not None


@on_ranks(3, comm=("shm",))
def test_invalid_meshes():
    model = mlp()
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 1, 3), mesh_dim_names=("a", "b", "c")))
    with pytest.raises(AssertionError, match="mesh_dim_names"):
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 3)))
    with pytest.raises(ValueError, match="factor of 3"):
        fully_shard(model, reshard_after_forward=2)
    with pytest.raises(ValueError, match="bool or an int"):
        fully_shard(model, reshard_after_forward="yes")
    assert not hasattr(model, "_fsdp_state") and type(model) is nn.Sequential
    fully_shard(model)
    assert whole(next(model.parameters())).shape == (7, 5)
