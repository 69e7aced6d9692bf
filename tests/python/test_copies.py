"""``copy.deepcopy`` of sharded models: sharded alike, equal values, and nothing shared with the original."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import on_ranks
from libfsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    summon_full_params,
)
from subjects import loss_of, mine, rows, seeded, whole


class Layers(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4)
        self.again = nn.Linear(4, 8, bias=False)
        if tied:
            self.again.weight = self.up.weight

    def forward(self, x):
        return self.down(self.norm(self.up(x) + self.again(x)))


def blocks(model, **options):
    return blocks_of(model, model.up, **options)


def blocks_of(model, block, **options):
    fully_shard(block, **options)
    return fully_shard(model, **options)


def frozen():
    model = seeded(Layers)
    model.up.requires_grad_(False)
    return blocks(model)


def ignoring():
    model = seeded(Layers)
    return blocks(model, ignored_params={*model.norm.parameters(), model.up.weight})


def ignoring_what_was_replaced():
    model = ignoring()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def as_a_list():
    model = seeded(Layers)
    fully_shard([model.up, model.down])
    return fully_shard(model)


class InALayer(nn.Module):
    """The first and the last layer are one unit, the last one within another."""

    def __init__(self):
        super().__init__()
        self.first, self.around = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.around(self.first(x))


def as_a_list_within():
    model = seeded(InALayer)
    fully_shard([model.first, model.around[1]])
    return blocks_of(model, model.around)


def hybrid():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return blocks(seeded(Layers), mesh=mesh)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "again": RowwiseParallel(input_layouts=Replicate())}
    return blocks(parallelize_module(seeded(Layers), mesh["tp"], plan), mesh=mesh["dp"])


class LayersOnOneMesh(Layers):
    def forward(self, x):
        return super().forward(DTensor.from_local(x, self.up.weight.device_mesh, [Shard(0)], run_check=False)).to_local()


def on_one_mesh():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = seeded(LayersOnOneMesh)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    return blocks(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def largest_dim(parameter):
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


KINDS = {
    "defaults": lambda: blocks(seeded(Layers)),
    "tied in one unit": lambda: fully_shard(seeded(lambda: Layers(tied=True))),
    "tied across units": lambda: blocks(seeded(lambda: Layers(tied=True))),
    "tied later": lambda: (lambda model: setattr(model.again, "weight", model.up.weight) or model)(blocks(seeded(Layers))),
    "frozen": frozen,
    "ignored": ignoring,
    "ignored, replaced": ignoring_what_was_replaced,
    "list": as_a_list,
    "list, within": as_a_list_within,
    "hybrid": hybrid,
    "tensor parallel": tensor_parallel,
    "one mesh": on_one_mesh,
    "fewer ranks": lambda: blocks(seeded(Layers), reshard_after_forward=2),
    "largest dim": lambda: blocks(seeded(Layers), shard_placement_fn=largest_dim),
    "offload": lambda: blocks(seeded(Layers), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "bfloat16": lambda: blocks(seeded(Layers), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "float64": lambda: blocks(seeded(Layers)).to(torch.float64),
}


def check_alike(twin, model):
    assert [type(each) for each in twin.modules()] == [type(each) for each in model.modules()]
    assert [unit.name for unit in describe(twin).units] == [unit.name for unit in describe(model).units]
    ours, theirs = list(twin.named_parameters()), list(model.named_parameters())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, p), (_, q) in zip(ours, theirs):
        assert p is not q and type(p) is type(q) and p.dtype == q.dtype and p.requires_grad == q.requires_grad, name
        assert p.shape == q.shape and p.stride() == q.stride(), name
        if isinstance(p, DTensor):
            assert p.device_mesh == q.device_mesh and p.placements == q.placements, name
            p, q = p.to_local(), q.to_local()
        assert torch.equal(p, q) and (p.data_ptr() != q.data_ptr() or p.numel() == 0), name


def train(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    dtype = next(model.parameters()).dtype
    for step in range(2):
        loss_of(model, mine(rows(step, 4)).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}


@on_ranks(4, comm=("shm",))
def test_a_copy_is_sharded_and_trains_as_the_original():
    for i, (name, make) in enumerate(KINDS.items()):
        model = make()
        if i % 2:
            train(model)
        try:
            twin = copy.deepcopy(copy.deepcopy(model))
            check_alike(twin, model)
            before = {path: whole(p).detach().clone() for path, p in model.named_parameters()}
            trained = train(twin)
            assert all(torch.equal(whole(p), before[path]) for path, p in model.named_parameters())
            expected = train(model)
            assert any(not torch.equal(value, before[path]) for path, value in expected.items())
            assert all(torch.equal(trained[path], value) for path, value in expected.items())
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@on_ranks(2, comm=("shm",))
def test_an_optimizer_is_copied_with_its_model():
    for model_first in (True, False):
        model = blocks(seeded(Layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        both = (model, optimizer) if model_first else (optimizer, model)
        for step in range(3):
            if step == 1:
                copies = copy.deepcopy(both)
                twin, twins = copies if model_first else copies[::-1]
                assert [id(p) for p in twins.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]
                pairs = [(model, optimizer), (twin, twins)]
            for each, its_optimizer in pairs if step else [(model, optimizer)]:
                loss_of(each, mine(rows(step, 4))).backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p is not q and torch.equal(whole(p), whole(q))


@on_ranks(2, comm=("shm",))
def test_a_copy_is_tied_as_the_original():
    """Also where only the parts are sharded, and are copied one after the other."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer)
    twin = copy.deepcopy(model)
    assert len(list(twin.parameters())) == 1 and twin[1].weight is twin[0].weight
    assert torch.equal(whole(next(twin.parameters())), whole(next(model.parameters())))
    loss_of(twin, mine(rows(0, 4))).backward()
    assert next(model.parameters()).grad is None


@on_ranks(2, comm=("shm",))
def test_a_list_that_is_one_unit():
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    fully_shard([layers])
    twin = copy.deepcopy(layers)
    assert all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(twin.parameters(), layers.parameters()))


@on_ranks(2, comm=("shm", "gloo"))
def test_parts_of_a_list_that_is_one_unit():
    """Each becomes a unit of its own, also where they are copied with the plain module that holds them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    fully_shard([model[0], model[1]])
    for twin in (copy.deepcopy(model), nn.Sequential(*map(copy.deepcopy, model))):
        values = dict(twin.named_parameters())
        for name, parameter in reference.named_parameters():
            assert torch.equal(whole(values[name]), parameter)
        loss_of(twin, mine(rows(0, 4))).backward()
        assert all(parameter.grad is not None for parameter in values.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(mine(rows(0, 4))), reference(mine(rows(0, 4))))


@on_ranks(2, comm=("gloo",))
def test_collectives_of_the_users_are_the_copys_too():
    calls = []

    def gather(output_tensor, input_tensor, group, async_op):
        calls.append(group.size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model = fully_shard(seeded(Layers))
    model.set_custom_all_gather(gather)
    model.set_separate_reduce_scatter_group(True)
    twin = copy.deepcopy(model)
    loss_of(twin, mine(rows(0, 4))).backward()
    assert set(calls) == {2}


@on_ranks(2, comm=("gloo",))
def test_a_copys_units_have_their_own_settings():
    def settings(model):
        return [fully_shard.state(each).collective_settings for each in (model, model[0])]

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model.set_separate_reduce_scatter_group(True, recurse=False)
    assert settings(copy.deepcopy(model)) == settings(model)
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(False, recurse=False)
    twin = copy.deepcopy(model)
    assert settings(twin) == settings(model)
    assert settings(copy.deepcopy(twin)) == settings(model)


class Encoder(nn.Module):
    """Its block is a unit of its own, its norm belongs to the unit above."""

    def __init__(self):
        super().__init__()
        self.block, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.block(x))


def two_encoders(shard):
    model = nn.Sequential(seeded(Encoder), nn.Linear(4, 4))
    shard(model[0].block)
    return shard(model)


def in_flat(module):
    return FullyShardedDataParallel(module)


def in_parts(module):
    return FullyShardedDataParallel(module, use_orig_params=True)


@on_ranks(1, 2, comm=("shm", "gloo"))
def test_copies_of_parts_whose_parameters_a_module_above_has_sharded():
    """Are refused, where they would read other parameters than they register. Whole, they are whole."""
    for shard, summon in (
        (fully_shard, summon_full_params),
        (in_flat, FullyShardedDataParallel.summon_full_params),
        (in_parts, FullyShardedDataParallel.summon_full_params),
    ):
        model = two_encoders(shard)
        norm = (model if shard is fully_shard else model.module)[0].norm
        with pytest.raises(TypeError, match="copy.deepcopy of a LayerNorm whose 'weight' a module above it has sharded"):
            copy.deepcopy(norm)
        with summon(model):
            twin = copy.deepcopy(norm)
        loss_of(model, mine(rows(0, 4))).backward()
        assert twin(torch.arange(4.0)).std() > 0.5
        twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
        assert not twin(torch.arange(4.0)).any() and norm.weight.all()


@on_ranks(2, comm=("shm",))
def test_a_unit_that_was_made_below_another_one():
    model = fully_shard(seeded(Layers))
    model.down = nn.Linear(8, 4)
    nn.init.ones_(model.down.weight)
    nn.init.ones_(model.down.bias)
    fully_shard(model.down)
    twin = copy.deepcopy(model)
    trained = train(twin)
    assert all(torch.equal(trained[name], value) for name, value in train(model).items())


@on_ranks(2, comm=("shm",))
def test_a_copy_that_is_made_in_inference_mode_is_trained():
    model = blocks(seeded(Layers))
    with torch.inference_mode():
        twin = copy.deepcopy(model)
    trained = train(twin)
    assert all(torch.equal(trained[name], value) for name, value in train(model).items())
