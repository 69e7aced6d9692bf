"""What the tests of flat parameters share."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import ShardingStrategy

import libfsdp
import on_gpus
from fsdp1_subjects import loss_of, reference_backward, summoned
from subjects import mine, rows

FSDP = libfsdp.FullyShardedDataParallel
TORCH = functools.partial(torch_fsdp.FullyShardedDataParallel, device_id=on_gpus.device())
BOTH = (FSDP, TORCH)
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def blocks():
    """Of odd sizes, with two tied biases below the second of two blocks."""
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.LayerNorm(9)), nn.Linear(9, 3)
    )
    model[1][2].bias = model[1][3].bias
    return model


def is_exact():
    return libfsdp._mesh._shared_memory or dist.get_world_size() == 1


def tolerance():
    return dict(rtol=0, atol=0) if is_exact() else {}


def units_of(model):
    """Of ``blocks()``: the parameters of each wrapper, outermost first."""
    return [[*model[0].parameters(), *model[2].parameters()], list(model[1].parameters())]


def share_of(tensors, strategy):
    """What a rank has of tensors that are laid one after another without gaps and cut into equal shares."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    if strategy is ShardingStrategy.NO_SHARD:
        return flat
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = -(-flat.numel() // ranks)
    return nn.functional.pad(flat, (0, share * ranks - flat.numel()))[rank * share : (rank + 1) * share]


def flats_of(model):
    return [wrapper._flat_param for wrapper in type(model).fsdp_modules(model)]


def check_flats(model, reference, strategy=None):
    for flat, params in zip(flats_of(model), units_of(reference), strict=True):
        torch.testing.assert_close(flat.detach(), share_of(params, strategy), **tolerance())
        if params[0].grad is None:
            assert flat.grad is None
        else:
            torch.testing.assert_close(flat.grad, share_of([p.grad for p in params], strategy), **tolerance())


def check_wholes(model, reference):
    with summoned(model, writeback=False):
        named = dict(model.named_parameters())
        assert list(named) == [name for name, _ in reference.named_parameters()]
        for name, parameter in reference.named_parameters():
            assert isinstance(named[name], nn.Parameter)
            torch.testing.assert_close(named[name].detach(), parameter.detach(), **tolerance())


def check_training(model, reference, strategy=None, steps=3, make=None):
    make = make or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ours, theirs = make(model.parameters()), make(reference.parameters())
    for step in range(steps):
        batch = rows(step, 5)
        loss = loss_of(model, mine(batch))
        torch.testing.assert_close(loss.detach(), loss_of(reference, mine(batch)).detach(), **tolerance())
        loss.backward()
        reference_backward(reference, batch)
        check_flats(model, reference, strategy)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        check_flats(model, reference, strategy)
    check_wholes(model, reference)
