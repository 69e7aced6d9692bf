"""In ``no_sync`` gradients wait, whole, for the backward that reduces them: they are seen, and dropped, as in PyTorch."""

import functools

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import libfsdp
from fsdp1_subjects import BOTH, blocks, check_same_gradient, loss_of, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FLAT = [functools.partial(wrap, use_orig_params=False) for wrap in BOTH]


def trained_blocks():
    """All of them: a flat parameter has no frozen parts."""
    model = seeded(blocks)
    return model.requires_grad_(True)


def backward(model, number, sync):
    if sync:
        loss_of(model, mine(rows(number, 5))).backward()
    else:
        with model.no_sync():
            loss_of(model, mine(rows(number, 5))).backward()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_like_pytorchs(ours, theirs):
    for (name, part), (other, theirs_part) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        check_same_gradient(part, theirs_part, name)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@on_ranks(2, 3, comm=("shm",))
def test_are_shown_as_pytorchs(strategy):
    for wraps in (BOTH, FLAT):
        models = [wrapped(trained_blocks(), wrap, sharding_strategy=strategy) for wrap in wraps]
        for number, sync in enumerate((False, False, True, False, True)):
            for model in models:
                backward(model, number, sync)
            if strategy is ShardingStrategy.FULL_SHARD or sync:
                check_like_pytorchs(*models)


@on_ranks(1, 2)
def test_are_dropped_with_the_others():
    for wrap in (BOTH[0], FLAT[0]):
        for drop in (lambda model: model.zero_grad(), lambda model: torch.optim.SGD(model.parameters()).zero_grad()):
            model, reference = (wrapped(trained_blocks(), wrap) for _ in range(2))
            backward(model, 0, sync=True)
            backward(model, 1, sync=False)
            drop(model)
            assert all(gradient is None for gradient in gradients_of(model).values())
            backward(model, 2, sync=True)
            backward(reference, 2, sync=True)
            for gradient, wanted in zip(gradients_of(model).values(), gradients_of(reference).values(), strict=True):
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_may_be_scaled():
    model, reference = (wrapped(trained_blocks(), BOTH[0]) for _ in range(2))
    backward(model, 0, sync=False)
    for gradient in gradients_of(model).values():
        gradient.mul_(2)
    backward(model, 1, sync=True)
    for number, sync in ((0, False), (0, False), (1, True)):
        backward(reference, number, sync)
    for gradient, wanted in zip(gradients_of(model).values(), gradients_of(reference).values(), strict=True):
        torch.testing.assert_close(gradient, wanted)


@on_ranks(2, comm=("shm",))
def test_have_the_dtype_in_which_they_are_reduced():
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for wrap in (BOTH[0], FLAT[0]):
        model = wrapped(trained_blocks(), wrap, mixed_precision=mixed)
        backward(model, 0, sync=False)
        assert {gradient.dtype for gradient in gradients_of(model).values()} == {torch.float32}
        backward(model, 1, sync=True)
        assert {gradient.dtype for gradient in gradients_of(model).values()} == {torch.float32}


@on_ranks(2, comm=("shm",))
def test_an_optimizer_does_not_take_them():
    model = wrapped(trained_blocks(), BOTH[0])
    backward(model, 0, sync=False)
    with pytest.raises(RuntimeError):
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    model.zero_grad()
    backward(model, 1, sync=True)
    libfsdp.FullyShardedDataParallel.clip_grad_norm_(model, 1.0)
