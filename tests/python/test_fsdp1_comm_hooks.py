"""``FullyShardedDataParallel.register_comm_hook``: gradients reduced by a function of the user's, or one of PyTorch's."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import libfsdp
import on_gpus
from fsdp1_subjects import loss_of, quietly, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FSDP = libfsdp.FullyShardedDataParallel
TORCH = functools.partial(torch_fsdp.FullyShardedDataParallel, device_id=on_gpus.device())
BOTH = (FSDP, TORCH)
SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def blocks():
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, 3))


def gradients(model, steps=2):
    """After backwards that add up."""
    for step in range(steps):
        loss_of(model, mine(rows(step, 5))).backward()
    return [parameter.grad for parameter in model.parameters()]


def check_close(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_pytorchs_default_hooks_reduce_as_no_hook(use_orig_params):
    for strategy in (*SHARDED, ShardingStrategy.NO_SHARD):
        options = dict(sharding_strategy=strategy, use_orig_params=use_orig_params)
        plain, hooked = (wrapped(seeded(blocks), FSDP, **options) for _ in range(2))
        whole = plain.sharding_strategy is ShardingStrategy.NO_SHARD
        hook = default_hooks.allreduce_hook if whole else default_hooks.reduce_scatter_hook
        hooked.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
        check_close(gradients(hooked), gradients(plain))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3, comm=("gloo",))
def test_what_hooks_are_given(use_orig_params):
    for strategy in (*SHARDED, ShardingStrategy.NO_SHARD):
        outcomes = []
        for wrap in BOTH:
            seen = []

            def hook(state, gradient, output=None):
                seen.append((state, gradient.shape, None if output is None else output.shape, gradient.dtype))
                (gradient if output is None else output).fill_(3)

            model = wrapped(seeded(blocks), wrap, sharding_strategy=strategy, use_orig_params=use_orig_params)
            model.register_comm_hook("the state", hook)
            values = [None if g is None or not g.numel() else g.unique().tolist() for g in gradients(model, steps=1)]
            outcomes.append((values, seen))
        (ours, given), (theirs, given_by_pytorch) = outcomes
        if use_orig_params:  # parameters begin elsewhere in what the hook is given
            assert (ours, len(given)) == (theirs, len(given_by_pytorch)), strategy
            assert all(part is None or whole.numel() == part.numel() * dist.get_world_size() for _, whole, part, _ in given)
        else:  # of a flat gradient, PyTorch's class shows what the hook has written to padding
            assert given == given_by_pytorch, strategy


@on_ranks(2, comm=("shm", "gloo"))
def test_hooks_of_low_precision():
    """They put tensors of another dtype behind what they are given. Only a device's memory has streams to note."""
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: None):
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            for strategy in (*SHARDED, ShardingStrategy.NO_SHARD):
                models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy) for wrap in BOTH]
                for model in models:
                    state = default_hooks.LowPrecisionState(dist.group.WORLD)
                    model.register_comm_hook(state, getattr(default_hooks, f"{name}_compress_hook"))
                ours, theirs = (gradients(model, steps=1) for model in models)
                assert all(gradient.dtype == torch.float32 for gradient in ours)
                check_close(ours, theirs)
                reduced = wrapped(
                    seeded(blocks), FSDP, sharding_strategy=strategy, mixed_precision=MixedPrecision(reduce_dtype=dtype)
                )
                check_close(ours, gradients(reduced, steps=1), rtol=2e-2, atol=1e-3)


@on_ranks(2, comm=("shm", "gloo"))
def test_hooks_of_low_precision_are_given_gradients_as_backward_made_them():
    fits_half_alone = 1 + 2**-9
    precision = MixedPrecision(reduce_dtype=torch.bfloat16)
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: None):
        for strategy in (*SHARDED, ShardingStrategy.NO_SHARD):
            for wrap in BOTH:
                model = wrap(nn.Linear(3, 2, bias=False), sharding_strategy=strategy, mixed_precision=precision)
                model.register_comm_hook(
                    default_hooks.LowPrecisionState(dist.group.WORLD), default_hooks.fp16_compress_hook
                )
                model(torch.full((1, 3), fits_half_alone)).sum().backward()
                gradient = next(model.parameters()).grad
                assert gradient.dtype == torch.float32
                assert gradient.tolist() == [fits_half_alone] * len(gradient), (wrap, strategy)


@on_ranks(2, comm=("gloo",))
def test_hooks_are_registered_once_and_on_the_root():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        loss_of(model, mine(rows(0, 5)))
        with pytest.raises(AssertionError, match="register_comm_hook can only be called on a root instance."):
            model[1].register_comm_hook(None, print)
        with pytest.raises(ValueError, match="The communication hook must be callable but got 3"):
            model.register_comm_hook(None, 3)
        model.register_comm_hook(None, lambda *_: None)
        with pytest.raises(AssertionError, match="A communication hook is already registered"):
            model.register_comm_hook(None, lambda *_: None)
        hybrid = quietly(wrap, seeded(blocks), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
        with pytest.raises(AssertionError, match="Communication hook is not supported for hybrid strategies"):
            hybrid.register_comm_hook(None, print)


@on_ranks(2, comm=("gloo",))
def test_what_a_hook_raises_comes_out_of_backward():
    def hook(*_):
        raise KeyError("in the hook")

    model = wrapped(seeded(blocks), FSDP)
    model.register_comm_hook(None, hook)
    with pytest.raises(KeyError, match="in the hook"):
        loss_of(model, mine(rows(0, 5))).backward()
