"""Gradients of low precision, and evaluation in full precision, of ``FullyShardedDataParallel``."""

import functools
import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import libfsdp
import on_gpus
from fsdp1_subjects import check_same_gradient, quietly, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FSDP = libfsdp.FullyShardedDataParallel
TORCH = functools.partial(torch_fsdp.FullyShardedDataParallel, device_id=on_gpus.device())
BOTH = (FSDP, TORCH)
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def blocks():
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, 3))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, comm=("gloo",))
def test_gradients_keep_the_dtype_of_their_reduction(use_orig_params):
    for strategy in STRATEGIES:
        policy = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
        models = [
            wrapped(seeded(blocks), wrap, sharding_strategy=strategy, mixed_precision=policy, use_orig_params=use_orig_params)
            for wrap in BOTH
        ]
        for model in models:
            model(mine(rows(0, 5))).float().sum().backward()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            check_same_gradient(ours, theirs)
            assert ours.dtype == torch.float32 and (theirs.grad is None or theirs.grad.dtype == torch.bfloat16)


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("offset", torch.ones(5))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.inner.weight.dtype, self.offset.dtype))
        return self.inner(x) + self.offset


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, comm=("gloo",))
def test_evaluation_in_full_precision(use_orig_params):
    policy = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    for first in ("train", "eval"):
        outcomes = []
        for wrap in BOTH:
            with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
                inner = quietly(wrap, seeded(Seen), mixed_precision=policy, use_orig_params=use_orig_params)
                model = quietly(wrap, nn.Sequential(inner, nn.Linear(5, 3)), mixed_precision=policy, use_orig_params=use_orig_params)
            reached = []
            for trains in (first == "train", first != "train", True):
                output = model.train(trains)(torch.ones(2, 5))
                output.float().sum().backward()
                reached.append((output.dtype, [p.grad is None for p in model.parameters() if p.numel() > 0]))
            outcomes.append((inner.module.seen, reached, {name: v.dtype for name, v in model.state_dict().items()}))
        assert outcomes[0] == outcomes[1], first
    low = [(torch.bfloat16,) * 3]
    assert outcomes[0][0] == [(torch.float32,) * 3] + low + low


@on_ranks(2, comm=("gloo",))
def test_evaluation_in_full_precision_is_for_all_wrappers():
    for wrap in BOTH:
        model = seeded(blocks)
        model[1] = wrap(model[1])
        with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
            model = wrap(model)
        with pytest.raises(ValueError, match="Expects one homogeneous value for _use_full_prec_in_eval"):
            model(rows(0, 5))
