"""Assignments to ``module.weight``: in place, of a new parameter, of another module's; tied weights among them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from harness import on_ranks
from libfsdp import fully_shard
from subjects import check_same, check_training, loss_of, mine, mlp, reference_backward, rows, seeded, shard_with, whole

IN_PLACE = {
    "added": lambda module: exec("module.weight += 1"),
    "data": lambda module: exec("module.weight.data *= 2"),
    "the same": lambda module: setattr(module, "weight", module.weight),
    "the registered one": lambda module: setattr(module, "weight", module._parameters["weight"]),
}


@on_ranks(1, 2)
def test_writes_in_place_and_assigns_back():
    for name, write in IN_PLACE.items():
        model, reference = shard_with(fully_shard, seeded(mlp)), seeded(mlp)
        before, handle = dict(model.named_parameters()), model[0].weight
        ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference))
        for _ in range(2):
            for module in (model[0], model[2][0], reference[0], reference[2][0]):
                with torch.no_grad():
                    write(module)
            assert all(parameter is before[path] for path, parameter in model.named_parameters()), name
            assert model[0].weight is handle and torch.equal(handle, reference[0].weight), name
            check_same(model, reference)
            loss_of(model, mine(rows(0, 5))).backward()
            reference_backward(reference, loss_of, rows(0, 5))
            ours.step(), theirs.step()
            check_same(model, reference)
            ours.zero_grad(), theirs.zero_grad()


class Tied(nn.Module):
    """Its two outer layers are tied from the beginning, or by `tie` later."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        if tied:
            self.tie()

    def tie(self):
        self.head.weight = self.embed.weight
        return self

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embed(x))))


UNITS = {"one": ("",), "two": ("embed", ""), "three": ("embed", "head", "")}


def sharded_tied(units, seed=1, tied=True, make=Tied):
    model = seeded(lambda: make(tied), seed)
    for path in UNITS[units]:
        fully_shard(model.get_submodule(path))
    return model


def check_tied(model):
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "body.weight", "body.bias"]


@on_ranks(2)
def test_tied_after_sharding():
    for units in UNITS:
        model, reference = sharded_tied(units, tied=False), seeded(Tied)
        model.tie()
        check_tied(model)
        check_training(model, reference, loss_of, (5,), exact=True, steps=3)
        check_tied(model)


@on_ranks(2, comm=("shm",))
def test_tied_between_sharded_and_not_yet_sharded():
    model = seeded(lambda: Tied(tied=False))
    fully_shard(model.embed)
    model.tie()
    fully_shard(model)
    check_tied(model)
    check_training(model, seeded(Tied), loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_tied_weights_are_assigned():
    for units in UNITS:
        model, source = sharded_tied(units), sharded_tied(units, seed=7)
        saved = {name: value.detach().clone() for name, value in source.state_dict().items()}
        assert set(saved) == {"embed.weight", "body.weight", "body.bias", "head.weight"}
        model.load_state_dict(saved, assign=True)
        check_tied(model)
        check_training(model, seeded(Tied, 7), loss_of, (5,), exact=True, steps=2)
        check_tied(model)


@on_ranks(2)
def test_tied_weights_on_meta_are_assigned():
    for units in UNITS:
        with torch.device("meta"):
            model = Tied()
        for path in UNITS[units]:
            fully_shard(model.get_submodule(path))
        saved = {name: value.detach().clone() for name, value in sharded_tied(units, seed=7).state_dict().items()}
        model.load_state_dict(saved, assign=True)
        check_tied(model)
        check_training(model, seeded(Tied, 7), loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_a_tied_weight_is_replaced_in_one_of_its_places():
    fresh = torch.rand(5, 5, generator=torch.Generator().manual_seed(3))
    for units in UNITS:
        for place in ("embed", "head"):
            model, reference = sharded_tied(units), seeded(Tied)
            setattr(model.get_submodule(place), "weight", nn.Parameter(fresh.clone()))
            reference.embed.weight = nn.Parameter(fresh.clone())
            reference.tie()
            assert torch.equal(model(mine(rows(0, 5))), reference(mine(rows(0, 5))))
            check_tied(model)
            check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_with_tensor_parallelism():
    """What a module reads is no leaf then, which PyTorch refuses to register."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(seeded(mlp), mesh["tp"], {"0": ColwiseParallel(use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"])
    reference = seeded(mlp)
    with pytest.raises(ValueError, match="non-leaf"), torch.no_grad():
        model[0].weight += 1
    with torch.no_grad():
        reference[0].weight += 1
    batch = mine(rows(0, 5))
    assert torch.equal(model(batch), reference(batch)), "it was written all the same, and is still there"
    assert isinstance(model[0].weight, DTensor) and model[0].weight is not model[0]._parameters["weight"]


@on_ranks(2, comm=("shm",))
def test_another_models_parameter():
    model, other, reference = sharded_tied("one", tied=False), sharded_tied("one", seed=7), seeded(Tied)
    for give in (lambda: other.embed.weight, lambda: other.embed._parameters["weight"]):
        model.head.weight = give()
        assert model.head.weight is other.embed.weight
        assert model.head._parameters["weight"] is other.embed._parameters["weight"]
        reference.head.weight = nn.Parameter(whole(other.embed._parameters["weight"].detach()).clone())
        assert torch.equal(model(mine(rows(0, 5))), reference(mine(rows(0, 5))))
        loss_of(model, mine(rows(0, 5))).backward()
        reference_backward(reference, loss_of, rows(0, 5))
        check_same(model, reference, what="gradients")
        model.zero_grad(), reference.zero_grad()
    dist.barrier()


@on_ranks(2, comm=("shm",))
def test_a_wrong_parameter_is_an_error_until_a_right_one_comes():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    fresh = torch.rand(7, 5, generator=torch.Generator().manual_seed(3))
    for each in (model[0], model[3]):
        each.weight = nn.Parameter(torch.rand(2, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match="'weight' has shape"):
            loss_of(model, mine(rows(0, 5)))
    model[0].weight, model[3].weight = nn.Parameter(fresh.clone()), nn.Parameter(reference[3].weight.detach().clone())
    reference[0].weight = nn.Parameter(fresh)
    model(mine(rows(0, 5)))
    model.reset_iter_state()
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


class ReadsAWeight(nn.Module):
    """Of a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(nn.functional.linear(x, self.layer.weight))


@on_ranks(2)
def test_a_parameter_of_a_unit_that_is_never_called():
    fresh = torch.rand(5, 5, generator=torch.Generator().manual_seed(3))
    model, reference = seeded(ReadsAWeight), seeded(ReadsAWeight)
    fully_shard(model.layer)
    fully_shard(model)
    layout = model.layer._parameters["weight"]
    for make in (torch.Tensor.clone, lambda whole: distribute_tensor(whole, layout.device_mesh, layout.placements)):
        model.layer.weight = nn.Parameter(torch.rand(2, 2))
        for _ in range(2):
            with pytest.raises(ValueError, match="'weight' has shape"):
                model(mine(rows(0, 5)))
        model.layer.weight, reference.layer.weight = nn.Parameter(make(fresh)), nn.Parameter(fresh.clone())
        model(mine(rows(0, 5)))
        model.reset_iter_state()
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_a_parameter_that_is_first_read_in_inference_mode():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    fresh = torch.rand(7, 5, generator=torch.Generator().manual_seed(3))
    model[0].weight, reference[0].weight = nn.Parameter(fresh.clone()), nn.Parameter(fresh)
    with torch.inference_mode():
        assert torch.equal(model(mine(rows(0, 5))), reference(mine(rows(0, 5))))
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_a_parameter_is_taken_away_and_put_back():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for take_away in (lambda module: setattr(module, "bias", None), lambda module: delattr(module, "bias")):
        values = [each[0].bias.detach().clone() for each in (model, reference)]
        take_away(model[0])
        if not hasattr(model[0], "bias"):
            model[0].register_parameter("bias", None)
        model(mine(rows(0, 5)))
        model.reset_iter_state()
        for each, value in zip((model, reference), values):
            each[0].bias = nn.Parameter(value + 1)
        model(mine(rows(0, 5)))
        model.reset_iter_state()
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_tied_to_what_another_module_has_registered():
    reference, model = seeded(Tied), seeded(lambda: Tied(tied=False))
    fully_shard(model.embed)
    model.head.weight = dict(model.embed.named_parameters())["weight"]
    fully_shard(model.head)
    fully_shard(model)
    check_tied(model)
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_replaced_again_before_anybody_looked():
    model = fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(10))))
    for step in range(20):
        model.to(torch.bfloat16).to(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        for layer in model:
            assert torch.equal(layer.weight, torch.full((8, 8), float(step)))


@on_ranks(1, 2)
def test_a_part_that_is_converted_there_and_back():
    model, reference = shard_with(fully_shard, seeded(mlp)), seeded(mlp)
    for step in range(20):  # the tensor of the second conversion may come to lie where the one before the first lay
        for converted in (model[2], reference[2]):
            converted.double()
            converted.float()
        optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, reference)]
        loss_of(model, mine(rows(step, 5))).backward()
        reference_backward(reference, loss_of, rows(step, 5))
        for each in optimizers:
            each.step()
            each.zero_grad()
        check_same(model, reference)
