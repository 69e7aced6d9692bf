"""Backwards within backwards, of some parameters only, and after a write: as without sharding."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import fully_shard
from subjects import loss_of, mine, recorded, rows, seeded, whole

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
    os.environ["FSDP_TIMEOUT"] = "8"
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=8))
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
