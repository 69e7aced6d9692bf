"""Backwards within backwards, of some parameters only, and after a write: as without sharding."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import libfsdp
from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from random_models import OwnFunction
from subjects import check_hollow, check_same, loss_of, mine, recorded, reference_backward, rows, seeded, traced, whole

WIDTH = 4


def linears(count):
    return (nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Segments(nn.Sequential):
    """Each layer a checkpoint with a backward of its own within the backward."""

    first = 0

    def forward(self, x):
        for layer in list(self)[self.first :]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def backward(model):
    loss_of(model, torch.ones(2, WIDTH, requires_grad=True)).backward()


@on_ranks(2)
def test_reentrant_checkpoints_of_units_that_stay_whole_gather_once():
    model = seeded(lambda: Segments(*linears(3)))
    for part in (*model, model):
        fully_shard(part, reshard_after_forward=False)
    backward(model)
    assert recorded(lambda: backward(model))["gather"] == {"0": 1, "1": 1, "2": 1}


@on_ranks(2, comm=("shm",))
def test_ranks_with_different_reentrant_checkpoints_reduce_unused_parameters_alike():
    os.environ["FSDP_TIMEOUT"] = "60"
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60))
    model = fully_shard(seeded(lambda: Segments(*linears(2))), mesh=DeviceMesh.from_group(group, "cpu"))
    model.set_reduce_scatter_unused_params(True)
    Segments.first = 1 - dist.get_rank()
    for _ in range(3):
        backward(model)


def stack():
    return nn.Sequential(*linears(3))


def sharded_stack():
    model = seeded(stack)
    for layer in (*model, model):
        fully_shard(layer)
    return model


@pytest.mark.parametrize("sharded", (False, True))
@on_ranks(1, 2)
def test_a_step_between_forward_and_backward_is_an_error(sharded):
    model = sharded_stack() if sharded else seeded(stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    backward(model)
    loss = loss_of(model, torch.ones(2, WIDTH))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = linears(2)
        self.head.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("stays_whole", [False, True])
@on_ranks(1, 2)
def test_what_waits_goes_with_a_backward_that_begins_outside_of_all_calls(stays_whole):
    """It leads to the input only, through a weight that is whole already or is gathered for it."""
    model = fully_shard(seeded(WithHead))
    model.set_reshard_after_backward(not stays_whole)
    for _ in range(2):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, WIDTH)).sum().backward()
        model.set_requires_gradient_sync(True)
        hidden = torch.ones(1, WIDTH, requires_grad=True)
        nn.functional.linear(hidden, model.head.weight).sum().backward()
        assert hidden.grad is not None
        assert all(parameter.grad is not None for parameter in model.body.parameters())


class Conjugating(nn.Module):
    """Autograd gives its weights' gradients as conjugates, or negatives, of what lies in memory."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.straight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        x = torch.complex(x, x * x)
        return torch.view_as_real(x @ self.turned.mH @ self.straight.conj()).tanh()


@on_ranks(1, 2, 3)
def test_gradients_that_are_seen_otherwise_than_they_lie_in_memory():
    model, reference = fully_shard(seeded(Conjugating)), seeded(Conjugating)
    for step in range(2):
        loss_of(model, mine(rows(step, 4))).backward()
        loss_of(reference, rows(step, 4)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


class Runs(torch.autograd.Function):
    """Hands on what it is given, and does something in its backward."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.action()
        return gradient, None


def backward_with(action, how):
    if how == "a function":
        loss_of(sharded_stack(), Runs.apply(torch.ones(2, WIDTH, requires_grad=True), action)).backward()
        return
    x = torch.ones(2, WIDTH, requires_grad=True) * 2
    x.register_hook(lambda gradient: action())
    loss = x.sum() if how == "a plain graph's hook" else loss_of(sharded_stack(), x)
    loss.backward()


def evaluate(model):
    with torch.no_grad():
        model(torch.ones(1, WIDTH))


def nothing(model):
    pass


def look(model, at=0):
    model[at].weight.norm()


@pytest.mark.parametrize("before", [nothing, evaluate, look])
@pytest.mark.parametrize("how", ["a hook", "a function", "a plain graph's hook"])
@on_ranks(2)
def test_another_model_is_trained_within_a_backward(how, before):
    model, reference = seeded(sharded_stack), seeded(stack)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.125) for each in (model, reference)]
    for step in range(3):
        batch = rows(step, WIDTH)

        def train():
            before(model)
            with torch.enable_grad():
                model.zero_grad()
                loss_of(model, mine(batch)).backward()
                assert all(parameter.grad is not None for parameter in model.parameters())
                optimizers[0].step()

        backward_with(train, how)
        reference.zero_grad()
        reference_backward(reference, loss_of, batch)
        optimizers[1].step()
        check_same(model, reference)


def within_another_backward(action):
    backward_with(action, "a plain graph's hook")


@pytest.mark.parametrize("action", [evaluate, backward])
@on_ranks(2)
def test_a_model_whose_backward_is_to_come_is_used_within_another(action):
    model, reference = sharded_stack(), seeded(stack)
    for step in range(2):
        for each in (model, reference):
            each.zero_grad()
            loss = loss_of(each, torch.ones(2, WIDTH))
            within_another_backward(torch.enable_grad()(lambda: action(each)))
            loss.backward()
        check_same(model, reference, what="gradients")


@on_ranks(2)
def test_a_weight_is_written_within_another_backward_that_has_read_it():
    model, reference = sharded_stack(), seeded(stack)

    def halve(each):
        look(each)
        with torch.no_grad():
            each[0].weight.mul_(0.5)

    for each in (model, reference):
        within_another_backward(lambda: halve(each))
    check_same(model, reference)


@on_ranks(2)
def test_one_rank_looks_within_another_backward_while_its_own_is_to_come():
    model, reference = sharded_stack(), seeded(stack)
    for step in range(3):
        for each in (model, reference):
            each.zero_grad()
            loss = loss_of(each, torch.ones(2, WIDTH))
            if step == 2 and dist.get_rank() == 0:
                within_another_backward(lambda: look(each, at=2))
            loss.backward()
        check_same(model, reference, what="gradients")


@on_ranks(2)
def test_another_backward_that_breaks_after_a_look_breaks_no_model():
    model, reference = sharded_stack(), seeded(stack)

    def look_and_fail(each):
        look(each)
        raise ValueError("no such batch")

    for each in (model, reference):
        loss = loss_of(each, torch.ones(2, WIDTH))
        with pytest.raises(ValueError, match="no such batch"):
            within_another_backward(lambda: look_and_fail(each))
        loss.backward()
    check_same(model, reference, what="gradients")


@on_ranks(2)
def test_units_are_sharded_after_the_second_of_two_checkpointed_backwards():
    model = sharded_stack()
    x = torch.ones(1, WIDTH, requires_grad=True)
    first, second = (checkpoint(model, x, use_reentrant=False).sum() for _ in range(2))
    first.backward()
    torch.autograd.grad(second, x)
    for name, layer in model.named_children():
        check_hollow(layer.weight, f"{name}.weight")


class Adapted(nn.Module):
    """What it trains is not used by all batches."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x, adapted):
        return self.trunk(self.adapter(x) if adapted else x)


def backward_of_adapted(model, adapted):
    model(torch.ones(2, WIDTH, requires_grad=True), adapted).sum().backward()


@on_ranks(1, 2)
def test_what_waits_goes_with_a_backward_that_brings_no_gradient():
    model, reference = fully_shard(seeded(Adapted)), seeded(Adapted)
    for step in range(2):
        model.zero_grad(), reference.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            for each in (model, reference):
                backward_of_adapted(each, adapted=part == 0)
        check_same(model, reference, what="gradients")


@on_ranks(2)
def test_ranks_reduce_alike_where_one_uses_no_trainable_parameter():
    model = fully_shard(seeded(Adapted))
    model.set_reduce_scatter_unused_params(True)
    for step in range(3):
        model.zero_grad()
        backward_of_adapted(model, adapted=dist.get_rank() == 0)
        reference = seeded(Adapted)
        backward_of_adapted(reference, adapted=True)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad / 2)


def looks_at_its_input(model):
    x = torch.ones(2, WIDTH, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)


def looks_in_a_plain_backward(model):
    within_another_backward(lambda: look(model, at=1))


@pytest.mark.parametrize("looks", [looks_at_its_input, looks_in_a_plain_backward])
@on_ranks(2, comm=("shm",))
def test_one_rank_looks_between_backwards_that_accumulate(looks):
    model, reference = seeded(sharded_stack), seeded(stack)
    for step in range(3):
        model.zero_grad(), reference.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            loss_of(model, mine(rows(2 * step + part, WIDTH))).backward()
            for of_a_rank in rows(2 * step + part, WIDTH).chunk(dist.get_world_size()):
                loss_of(reference, of_a_rank).backward()
            model.set_requires_gradient_sync(True)
            if dist.get_rank() == 0 and part == 0:
                looks(model)
        for ours, expected in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(whole(ours.grad), expected.grad / dist.get_world_size())


class Fused(nn.Linear):
    """Its weight is used in a function of its own only."""

    def forward(self, x):
        return OwnFunction.apply(x, self.weight)


def once(model, x):
    loss_of(model, x).backward()


def with_gradient_penalty(model, x):
    x.requires_grad_()
    loss = loss_of(model, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.pow(2).sum()).backward()


def twice_through_one_graph(model, x):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_before_two_backwards(model, x):
    losses = [loss_of(model, x), loss_of(model, 2 * x)]
    for loss in losses:
        loss.backward()


GRADIENTS_NOBODY_ANNOUNCES = pytest.mark.parametrize(
    ("layer", "step"),
    (
        (Fused, once),
        (nn.Linear, with_gradient_penalty),
        (nn.Linear, twice_through_one_graph),
        (nn.Linear, two_forwards_before_two_backwards),
    ),
    ids=("custom functions", "gradient penalty", "retained graph", "two forwards, two backwards"),
)


def check_memory(model, step):
    """No more is whole at a time than `describe` says."""
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    for turn in range(4):
        events = traced(lambda: step(model, torch.ones(2, 3, WIDTH)))
        taken = [event["args"] for event in events if event["ph"] == "C"]
        (bound,) = {each["bound"] for each in taken}
        assert bound + 2 * shards == libfsdp.describe(model).bytes_peak, "with shards and their gradients"
        most = max(each["whole parameters"] + each["gradients"] for each in taken)
        assert 0 < most <= bound, turn


@GRADIENTS_NOBODY_ANNOUNCES
@pytest.mark.parametrize("reduce_dtype", (None, torch.float64))
@on_ranks(2, 4)
def test_no_more_is_whole_than_describe_says(layer, step, reduce_dtype):
    """Four ranks are two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if dist.get_world_size() == 4 else None
    model = seeded(lambda: nn.Sequential(*(layer(WIDTH, WIDTH, bias=False) for _ in range(8))))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    check_memory(model, step)
