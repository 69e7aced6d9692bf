"""One rank alone reads parameters that are whole: no rank may issue another collective for it."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import loss_of, mine, rows, seeded

WIDTH = 4
CASTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # over shared memory, gathers need all ranks then


def stack():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def impatient():
    """Of all ranks, that wait for one another for a minute only."""
    os.environ["FSDP_TIMEOUT"] = "60"
    ranks = list(range(dist.get_world_size()))
    return DeviceMesh.from_group(dist.new_group(ranks, timeout=datetime.timedelta(seconds=60)), "cpu")


def sharded(**options):
    model, mesh = seeded(stack), impatient()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=CASTS, **options)
    return model


def look_at(layer):
    if dist.get_rank() == 0:
        layer.weight.norm().item()


@on_ranks(2)
def test_at_what_was_unsharded_for_it():
    model = sharded()
    with torch.no_grad():
        results = [model(torch.ones(2, WIDTH)) for _ in range(3)]
        model[1].unshard()
        look_at(model[1])
        model[1].reshard()
        assert torch.equal(model(torch.ones(2, WIDTH)), results[0])


@pytest.mark.parametrize("records", (False, True))
@on_ranks(2)
def test_between_steps_at_what_was_unsharded(records):
    for layer, reshards in ((0, True), (0, False), (2, False)):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(4):
            loss_of(model, mine(rows(step, WIDTH))).backward()
            optimizer.step()
            model[layer].unshard()
            with torch.set_grad_enabled(records):
                look_at(model[layer])
            if reshards:
                model[layer].reshard()
            if step % 2:
                with torch.no_grad():
                    model(torch.ones(2, WIDTH))


@on_ranks(4, comm=("gloo",))
def test_between_evaluations_where_ranks_keep_shares():
    model = sharded(reshard_after_forward=2)
    for step in range(3):
        loss_of(model, mine(rows(step, WIDTH))).backward()
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
            look_at(model[3])


@on_ranks(2)
def test_after_an_evaluation_before_the_next_step():
    for records in (False, True):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(4):
            loss_of(model, mine(rows(step, WIDTH))).backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
            with torch.set_grad_enabled(records):
                look_at(model[3])


@on_ranks(2)
def test_in_backward_at_a_unit_that_has_a_prefetch_list():
    model = sharded(reshard_after_forward=False)
    model[0].set_reshard_after_forward(True)
    model[2].set_modules_to_backward_prefetch([model[0]])
    model[3].weight.register_hook(lambda _: look_at(model[2]))
    for step in range(3):
        loss_of(model, mine(rows(step, WIDTH))).backward()


@on_ranks(2)
def test_between_forward_and_backward():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(4):
        loss = loss_of(model, mine(rows(step, WIDTH)))
        look_at(model[3])
        look_at(model[2])
        loss.backward()
        optimizer.step()


@on_ranks(2)
def test_at_what_an_evaluation_that_ended_early_has_gathered_ahead():
    model = sharded()
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, WIDTH))
        model[1](model[0](torch.ones(2, WIDTH)))
        look_at(model[2])
        model(torch.ones(2, WIDTH))


@on_ranks(2)
def test_at_a_shard_after_a_write_through_its_module():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(3):
        with torch.no_grad():
            model[0].weight.clamp_(-0.25, 0.25)
            if dist.get_rank() == 0:
                next(model.parameters()).to_local().norm().item()
            if step % 2:
                model(torch.ones(2, WIDTH))
        loss_of(model, mine(rows(step, WIDTH))).backward()
        optimizer.step()


class Product(torch.autograd.Function):
    """Whose operators autograd does not see, and which reads its weight again in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class ByProduct(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


class OfProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ByProduct(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.looks = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.looks and layer is self.layers[0]:
                look_at(layer)
        return x


def unshard_second(model):
    model.layers[1].unshard()


def losses_of_products(looks, before_step, mesh, **options):
    model = seeded(OfProducts)
    model.looks = looks
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=CASTS, **options)
    return losses_of(model, before_step)


def losses_of(model, before_step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    losses = []
    for step in range(4):
        before_step(model)
        loss = loss_of(model, mine(rows(step, WIDTH)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(2)
def test_within_a_forward_of_custom_functions_before_a_unit_that_was_unsharded():
    mesh = impatient()
    expected = losses_of_products(False, unshard_second, mesh)
    assert losses_of_products(True, unshard_second, mesh) == expected


@on_ranks(4)
def test_within_a_forward_of_custom_functions_of_which_shares_are_kept():
    mesh = impatient()
    expected = losses_of_products(False, lambda model: None, mesh, reshard_after_forward=2)
    assert losses_of_products(True, lambda model: None, mesh, reshard_after_forward=2) == expected


@on_ranks(2)
def test_at_a_shard_after_a_collective_through_its_module():
    model, mesh = seeded(stack), impatient()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    for _ in range(3):
        weight = model[1].weight
        expected = 2 * weight.detach().clone()
        with torch.no_grad():
            dist.all_reduce(weight)
            if dist.get_rank() == 0:
                shard = dict(model.named_parameters())["1.weight"].to_local()
                assert torch.equal(shard + 0, expected[: shard.shape[0]])
        dist.barrier()
        assert torch.equal(weight, expected)
        model[1].reshard()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stack()
        self.looks = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.looks and layer is self.layers[0]:
                with torch.no_grad():
                    look_at(self.layers[1])
        return x


@on_ranks(2)
def test_within_a_part_of_the_model_that_is_called_by_itself():
    def losses(looks):
        model = seeded(lambda: nn.Sequential(Encoder(), nn.Linear(WIDTH, WIDTH)))
        encoder = model[0]
        encoder.looks = looks
        for layer in (*encoder.layers, encoder, model[1], model):
            fully_shard(layer, mesh=mesh, mp_policy=CASTS)
        return losses_of(encoder, unshard_second)

    mesh = impatient()
    assert losses(True) == losses(False)


@on_ranks(2)
def test_at_shards_after_a_collective_that_gathers_into_their_modules():
    model, mesh = seeded(stack), impatient()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        for _ in range(2):
            weights = [model[0].weight, model[1].weight]
            expected = [torch.full((WIDTH, WIDTH), 1.0 + rank) for rank in range(2)]
            [weight.norm() for weight in weights]
            dist.all_gather(weights, expected[dist.get_rank()])
            if dist.get_rank() == 0:
                for name in ("0.weight", "1.weight"):
                    shard = dict(model.named_parameters())[name].to_local()
                    assert torch.equal(shard + 0, expected[int(name[0])][: shard.shape[0]])
            dist.barrier()
            assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
            for layer in model:
                layer.reshard()
