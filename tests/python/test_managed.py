"""Which parameters fully_shard manages, and in which modules."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import libfsdp
from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import check_training, even, is_sharded, loss_of, mine, mlp, reference_backward, rows, seeded, whole


@on_ranks(2, comm=("shm",))
def test_replicated_subtrees_are_left_alone():
    model, reference = seeded(mlp), seeded(mlp)
    replicate(model[2])
    fully_shard(model)
    assert [is_sharded(p) for p in model.parameters()] == [True, True, False, False, True, True]
    loss_of(model, mine(rows(0, 5))).backward()
    reference_backward(reference, loss_of, rows(0, 5))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2, comm=("shm",))
def test_of_sharded_and_replicated_subtrees_a_root_has_nothing():
    model = seeded(mlp)
    fully_shard(model[0])
    replicate(model[2])
    fully_shard(model)
    assert {unit.name: unit.numel for unit in libfsdp.describe(model).units} == {"(root)": 9 * 3 + 3, "0": 5 * 7 + 7}


@on_ranks(2, comm=("gloo",))
def test_sharded_modules_are_left_alone_by_replicate():
    reference, model = seeded(mlp), seeded(mlp)
    fully_shard(model[2])
    replicate(model)
    loss_of(model, mine(rows(0, 5))).backward()
    reference_backward(reference, loss_of, rows(0, 5))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)
    twin = copy.deepcopy(model[2])
    for module in (model[2], twin):
        with pytest.raises(RuntimeError, match="already managed"):
            replicate(module)


@on_ranks(2, comm=("shm",))
def test_what_several_modules_share_stays_shared():
    """A parameter, a buffer, a module; and a module of a list that is inside of another one."""
    model = seeded(mlp)
    model[0].weight = model[2][0].weight = nn.Parameter(torch.rand(7, 5))
    model[0].register_buffer("table", torch.arange(3.0))
    model[3].register_buffer("table", model[0].table)
    table = model[0].table
    assert fully_shard([model, model[2], model[2][0]]) == [model, model[2], model[2][0]]
    assert model[0]._parameters["weight"] is model[2][0]._parameters["weight"]
    assert model[0].table is model[3].table is table and torch.equal(table, torch.arange(3.0))
    names = [type(module).__name__ for module in (model, model[2], model[2][0])]
    assert names == ["FSDPSequential", "Sequential", "Linear"], "the one around the others is the unit"
    assert len(list(model.parameters())) == 5 and all(map(is_sharded, model.parameters()))


@on_ranks(2)
def test_trainable_parameters_of_several_dtypes_in_one_unit():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3).double()

        def forward(self, x):
            return self.second(self.first(x).double())

    reference, model = seeded(Several), fully_shard(seeded(Several))
    check_training(model, reference, lambda module, batch: module(batch).pow(2).mean(), (5,), exact=True, steps=2)


@on_ranks(2)
def test_a_module_that_stands_in_two_places():
    def make():
        block = nn.Linear(5, 5)
        return nn.Sequential(block, nn.Tanh(), block)

    for units in ([], [0]):
        reference, model = seeded(make), seeded(make)
        for i in units:
            fully_shard(model[i])
        fully_shard(model)
        assert len(list(model.parameters())) == 2 and model[0] is model[2]
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_a_list_as_the_root():
    reference, model = seeded(mlp), seeded(mlp)
    fully_shard([model[0], model[2], model[3]])
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_layers_are_sharded_as_they_are_made():
    """Where one parameter lay another may come to lie: they are not the same."""
    layers = []
    for _ in range(20):
        layers.append(fully_shard(nn.Linear(4, 4)))
        gc.collect()
    model = fully_shard(nn.Sequential(*layers))
    loss_of(model, torch.rand(2, 4)).backward()
    assert all(p.grad is not None for p in model.parameters()) and len(list(model.parameters())) == 40


@on_ranks(2)
def test_frozen_eight_bit_parameters_in_the_same_unit():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            coarse = torch.rand(6, 4).to(torch.float8_e4m3fn)
            self.table = nn.Parameter(coarse, requires_grad=False)
            self.index = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x):
            return self.linear(x) @ self.table.float().T + self.index.sum()

    reference, model = seeded(Mixed), fully_shard(seeded(Mixed))
    assert torch.equal(model(torch.ones(1, 4)), reference(torch.ones(1, 4)))
    loss_of(model, mine(rows(0, 4))).backward()
    assert model.linear._parameters["weight"].grad is not None
    assert model._parameters["table"].grad is None


@on_ranks(4, comm=("shm",))
def test_replicas_keep_what_they_were_made_with():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    model = seeded(mlp, seed=replica)
    model.register_buffer("counts", torch.full((2,), float(replica)))
    fully_shard(model, mesh=mesh)
    for p, q in zip(model.parameters(), seeded(mlp, seed=replica).parameters(), strict=True):
        assert torch.equal(whole(p.to_local() * 1), whole(p.to_local()))
        rows_of_mine = q.chunk(2)[mesh["shard"].get_local_rank()]
        assert torch.equal(p.to_local(), rows_of_mine), "nothing is broadcast"
    assert torch.equal(model.counts, torch.full((2,), float(replica)))
    for tensor in (*(p.to_local() for p in model.parameters()), *model.buffers()):  # the user does it
        dist.broadcast(tensor, group_src=0, group=mesh.get_group("replicate"))
    assert torch.equal(model.counts, torch.zeros(2))
    for p, q in zip(model.parameters(), seeded(mlp, seed=0).parameters(), strict=True):
        assert torch.equal(model.get_submodule("0").weight.shape and whole(p), q)


@on_ranks(2, comm=("shm",))
def test_meta_device_context_and_low_precision():
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 1))
            for layer in model:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        dtype = policy.param_dtype or torch.float32
        out = model(torch.ones(2, 8))
        assert out.dtype == dtype and torch.equal(out, torch.full((2, 1), 3.8125, dtype=dtype))


@on_ranks(2)
def test_negative_dimensions_and_contiguous_shards():
    for dim in (-1, 1):
        model = seeded(even)
        fully_shard(model, shard_placement_fn=lambda p, dim=dim: Shard(dim) if p.ndim == 2 else None)
        reference = seeded(even)
        assert model[0]._parameters["weight"].placements == (Shard(1),)
        check_training(model, reference, loss_of, (4,), exact=True, steps=2)
        loss_of(model, mine(rows(0, 4))).backward()
        for p in model.parameters():
            assert p.is_contiguous() and p.to_local().is_contiguous() and p.grad.to_local().is_contiguous()
        assert model[0].weight.is_contiguous()


@on_ranks(2, comm=("shm",))
def test_what_a_module_below_has_ignored_stays_as_it_is():
    model = seeded(mlp)
    fully_shard(model[2], ignored_params={model[2][0].bias})
    fully_shard(model)
    assert [name for name, p in model.named_parameters() if not is_sharded(p)] == ["2.0.bias"]


@on_ranks(2, comm=("shm",))
def test_from_the_bottom_up():
    model = fully_shard(seeded(mlp))
    for module in (model[2], [model[0], model[3]]):
        with pytest.raises(ValueError, match="weight.* an earlier call on a module above it has sharded"):
            fully_shard(module)
    check_training(model, seeded(mlp), loss_of, (5,), exact=True, steps=1)
