"""Rows of the table of differences from PyTorch, beside PyTorch where it does something of its own."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import libfsdp
from harness import on_ranks
from libfsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from subjects import check_same, loss_of, mine, mlp, needs_mesh_dims, reference_backward, rows, seeded, shard_with


def dtypes_that_hooks_see(shard):
    """Of inputs and outputs, by when the hooks were registered."""
    seen = {}
    model = nn.Linear(4, 4)

    def watch(when, **options):
        model.register_forward_pre_hook(lambda _, args: seen.update({(when, "in"): args[0].dtype}), **options)
        model.register_forward_hook(lambda _, args, out: seen.update({(when, "out"): out.dtype}), **options)

    watch("before")
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    watch("after")
    watch("first", prepend=True)
    assert model(torch.rand(2, 4)).dtype == torch.float64
    return seen


@on_ranks(1, comm=("shm",))
def test_casts_are_around_all_hooks():
    ours, theirs = dtypes_that_hooks_see(fully_shard), dtypes_that_hooks_see(torch_fsdp.fully_shard)
    assert set(ours.values()) == {torch.bfloat16}
    differs = {key: dtype for key, dtype in theirs.items() if dtype != torch.bfloat16}
    assert differs == {("first", "in"): torch.float32, ("after", "out"): torch.float64}


@on_ranks(2)
def test_writes_between_a_forward_and_its_backward():
    model, reference = shard_with(fully_shard, seeded(mlp)), seeded(mlp)

    def check_refused():
        with pytest.raises(libfsdp.Error, match="'0.weight' was written between the beginning.*reset_iter_state"):
            with torch.no_grad():
                model[0].weight.zero_()

    loss = loss_of(model, mine(rows(0, 5)))
    check_refused()
    loss.backward()
    reference_backward(reference, loss_of, rows(0, 5))
    check_same(model, reference)
    check_same(model, reference, what="gradients")
    loss = loss_of(model, mine(rows(1, 5)))
    check_refused()
    model.reset_iter_state()
    with torch.no_grad():
        for each in (model, reference):
            each[0].weight.zero_()
    with libfsdp.summon_full_params(model):
        assert torch.equal(model[0].weight, torch.zeros(7, 5))
    loss = loss_of(model, mine(rows(1, 5)))
    check_refused()
    del loss  # no backward will come
    with torch.no_grad():
        for each in (model, reference):
            each[0].weight.fill_(1)
    with libfsdp.summon_full_params(model):
        assert torch.equal(model[0].weight, torch.ones(7, 5))
    check_same(model, reference)


class Spread(nn.Module):
    """Its weight is a DTensor on three dimensions of a mesh, cut along one of them."""

    def __init__(self, mesh, placements):
        super().__init__()
        torch.manual_seed(1)
        self.whole = torch.rand(6, 4)
        self.weight = nn.Parameter(distribute_tensor(self.whole, mesh, placements))

    def forward(self, x):
        return x @ self.weight.full_tensor().T


def check_spread(model, mesh):
    assert torch.equal(model._parameters["weight"].full_tensor(), model.whole)
    x = rows(0, 4)[4 * mesh.get_local_rank("dp") :][:4]
    model(x).sum().backward()
    expected = rows(0, 4)[:8].sum(0) / 2
    torch.testing.assert_close(model._parameters["weight"].grad.full_tensor(), expected.expand(6, 4))


@on_ranks(4)
def test_parameters_of_three_mesh_dimensions():
    mesh = init_device_mesh("cpu", (2, 2, 1, 1), mesh_dim_names=("dp", "a", "b", "c"))
    make = lambda: Spread(mesh["a", "b", "c"], [Shard(0), Replicate(), Replicate()])  # noqa: E731
    with pytest.raises(NotImplementedError, match="only supports 1D TP"):
        torch_fsdp.fully_shard(make(), mesh=mesh["dp"])
    model = fully_shard(make(), mesh=mesh["dp"])
    assert model._parameters["weight"].device_mesh.mesh_dim_names == ("dp", "a", "b", "c")
    check_spread(model, mesh)


@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_dp_mesh_dims_with_an_equal_mesh_and_with_placements_for_replicas():
    names = ("dp", "a", "b")
    mesh, equal = (init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names) for _ in range(2))
    make = lambda: Spread(mesh, [Replicate(), Shard(0), Replicate()])  # noqa: E731
    for options in (
        dict(mesh=equal, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        dict(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), shard_placement_fn=lambda p: Shard(1)),
    ):
        with pytest.raises((AssertionError, ValueError)):
            torch_fsdp.fully_shard(make(), **options)
        check_spread(fully_shard(make(), **options), mesh)
