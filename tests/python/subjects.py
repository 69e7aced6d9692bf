"""Models and training loops that the tests share."""

import collections
import json
import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import libfsdp

BATCH = 4  # of each rank


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 9), nn.GELU()), nn.Linear(9, 3))


def even():
    """As `mlp`, with rows that two ranks share evenly."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 12), nn.GELU()), nn.Linear(12, 4))


class Methods(nn.Module):
    """Has another method beside ``forward``."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.second(self.first(x))

    def encode(self, x, *, scale=1):
        return self.first(x) * scale


def shard_with(shard, model, **options):
    for block in (model[0], model[2], model):
        shard(block, **options)
    return model


TORCH_IS_OLD = torch.__version__ < (2, 12)
needs_mesh_of_a_parameter = pytest.mark.skipif(TORCH_IS_OLD, reason="torch 2.11 has no ShardPlacementResult")
needs_mesh_dims = pytest.mark.skipif(TORCH_IS_OLD, reason="PyTorch's fully_shard of torch 2.11 has no dp_mesh_dims")


def check_hollow(tensor, name):
    """Its memory is gone. Raw access says whose it was, or finds no address, with a torch that cannot say more."""
    if TORCH_IS_OLD:
        assert tensor.data_ptr() == 0
    else:
        with pytest.raises(RuntimeError, match=f"'{name}'.*sharded at this moment"):
            tensor.data_ptr()


def is_sharded(parameter):
    return isinstance(parameter, DTensor)


def loss_of(model, batch):
    return model(batch).float().pow(2).mean()


def rows(step, *shape):
    """The batch of all ranks at a step; the same everywhere."""
    return torch.randn(BATCH * dist.get_world_size(), *shape, generator=torch.Generator().manual_seed(100 + step))


def mine(batch):
    rank = dist.get_rank()
    return batch[rank * BATCH : (rank + 1) * BATCH]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_whole_is(tensor, expected, **how):
    """Each rank looks at its own part, which takes no communication, if that is cut in a plain way."""
    assert tensor.shape == expected.shape
    if all(type(placement) in (Replicate, Shard) for placement in tensor.placements):
        expected = distribute_tensor(expected.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None)
        torch.testing.assert_close(tensor.to_local(), expected.to_local(), **how)
    else:
        torch.testing.assert_close(whole(tensor), expected.detach(), **how)


def reference_backward(model, loss_of, batch):
    """Gradients of the unsharded model, added rank after rank and then divided, as the shared-memory group does."""
    world = dist.get_world_size()
    for parts in batch.split(BATCH):
        loss_of(model, parts).backward()
    for parameter in {id(p): p for p in model.parameters()}.values():
        if parameter.grad is not None:
            parameter.grad.div_(world)


def check_same(sharded, reference, exact=True, what="parameters"):
    ours, theirs = dict(sharded.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert isinstance(parameter, DTensor), name
        a, b = (parameter, theirs[name]) if what == "parameters" else (parameter.grad, theirs[name].grad)
        assert (a is None) == (b is None), f"{what} of {name}: {a} against {b}"
        if a is not None:
            tolerance = dict(rtol=0, atol=0) if exact else {}
            assert_whole_is(a, b, msg=lambda m: f"{what} of {name}: {m}", **tolerance)


def check_training(sharded, reference, loss_of, shape, exact, steps=4, optimizer=torch.optim.AdamW, **options):
    """Losses, gradients and parameters of `sharded` on its part of the batch are those of `reference` on all of it."""
    ours = optimizer(sharded.parameters(), **options or dict(lr=1e-2))
    theirs = optimizer(reference.parameters(), **options or dict(lr=1e-2))
    for step in range(steps):
        batch = rows(step, *shape)
        loss = loss_of(sharded, mine(batch))
        with torch.no_grad():
            expected = loss_of(reference, mine(batch))
        torch.testing.assert_close(loss.detach(), expected, rtol=0 if exact else None, atol=0 if exact else None)
        loss.backward()
        reference_backward(reference, loss_of, batch)
        check_same(sharded, reference, exact, "gradients")
        ours.step()
        theirs.step()
        check_same(sharded, reference, exact)
        ours.zero_grad()
        theirs.zero_grad()


def traced(step):
    """The events of a trace of the step."""
    with tempfile.TemporaryDirectory() as folder:
        with libfsdp.trace(pathlib.Path(folder) / "step.json"):
            step()
        (file,) = pathlib.Path(folder).iterdir()
        return json.loads(file.read_text())


def recorded(step):
    """What the engine does in a step: how often it "gather"s, "start reduction"s and so on, for each unit."""
    counts = collections.defaultdict(collections.Counter)
    for event in traced(step):
        if event["ph"] == "X":
            counts[event["name"]][event.get("args", {}).get("unit")] += 1
    return counts
