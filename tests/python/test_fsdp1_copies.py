"""``copy.deepcopy`` of what ``FullyShardedDataParallel`` has wrapped."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

import libfsdp
from fsdp1_subjects import loss_of, summoned, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FSDP = libfsdp.FullyShardedDataParallel


class Tied(nn.Module):
    """A block, a weight that is tied to one in it, a module that lists its parameters, and a buffer."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.rnn = nn.GRU(5, 5)
        self.head = nn.Linear(5, 5)
        self.head.weight = self.block[0].weight
        self.register_buffer("offset", torch.ones(5))
        self.left_alone = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.head(self.rnn(self.block(x))[0]) * self.left_alone + self.offset


def made(wrap=FSDP, **options):
    model = seeded(Tied)
    model.block = wrap(model.block, **options)
    return wrap(model, ignored_states=[model.left_alone], **options)


def wholes(model):
    with summoned(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def check_equal(one, other):
    ours, theirs = wholes(one), wholes(other)
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def train(model, optimizer, steps):
    for step in range(steps):
        loss_of(model, mine(rows(step, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIONS = [
    dict(),
    dict(cpu_offload=CPUOffload(True)),
    dict(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)),
    dict(sharding_strategy=ShardingStrategy.NO_SHARD),
    dict(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
]


@pytest.mark.meet(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_a_copy_trains_as_the_original(use_orig_params):
    for options in OPTIONS:
        model = made(use_orig_params=use_orig_params, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, steps=2)
        twin, twins_optimizer = copy.deepcopy((model, optimizer))
        before = wholes(model)
        assert type(twin) is type(model) and type(twin.block) is FSDP
        assert [tuple(p.shape) for p in twin.parameters()] == [tuple(p.shape) for p in model.parameters()]
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
        assert {id(p) for p in twins_optimizer.param_groups[0]["params"]} == {id(p) for p in twin.parameters()}
        assert twin.head.weight is twin.block[0].weight
        check_equal(twin, model)
        train(twin, twins_optimizer, steps=2)
        after = wholes(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(model, optimizer, steps=2)
        check_equal(twin, model)
        assert twin.offset.dtype == model.offset.dtype and list(twin.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm", "gloo"))
def test_averages_over_steps(use_orig_params):
    """A second model that follows the first, and is evaluated."""

    def make():
        return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)), nn.Linear(7, 3))

    outputs = []
    for model in (wrapped(seeded(make), FSDP, use_orig_params=use_orig_params), seeded(make)):
        follower = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, rows(step, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for own, other in zip(follower.parameters(), model.parameters(), strict=True):
                    own.lerp_(other, 0.1)
                outputs.append(follower.eval()(rows(step, 5)))
            follower.train()
    torch.testing.assert_close(outputs[:3], outputs[3:])


@on_ranks(2, comm=("shm",))
def test_copies_of_parts_of_what_is_wrapped():
    model = nn.Sequential(wrapped(seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))), FSDP))
    loss_of(model, rows(0, 5)).backward()
    twin = copy.deepcopy(model)
    inner = copy.deepcopy(model[0][1])
    check_equal(twin[0], model[0])
    torch.testing.assert_close(inner(torch.ones(1, 5)), model[0][1](torch.ones(1, 5)))
    assert inner.check_is_root()
    with pytest.raises(ValueError, match="expected to be in states"):
        with summoned(model[0]):
            copy.deepcopy(model[0])


@on_ranks(2, comm=("shm",))
def test_copies_reduce_as_the_original():
    def hook(_state, _gradient, output):
        output.fill_(3)

    model = made()
    model.register_comm_hook(None, hook)
    twin = copy.deepcopy(model)
    loss_of(twin, rows(0, 5)).backward()
    assert all(parameter.grad.max() == 3 for parameter in (twin._flat_param, twin.block._flat_param))
    frozen = made()
    frozen.block._flat_param.requires_grad_(False)
    twin = copy.deepcopy(frozen)
    loss_of(twin, rows(0, 5)).backward()
    assert twin.block._flat_param.grad is None and twin._flat_param.grad is not None


@on_ranks(2, comm=("shm",))
def test_hooks_of_the_wrapper_are_called_as_the_originals():
    model, called = made(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    model.register_forward_hook(lambda _module, args, kwargs, output: called.append("after"), with_kwargs=True)
    model.register_full_backward_hook(lambda *_: called.append("backward"))
    twin = copy.deepcopy(model)
    losses = [loss_of(each, rows(0, 5)) for each in (model, twin)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert called == ["after", "after", "backward", "backward"]
