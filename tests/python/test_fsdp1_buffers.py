"""Buffers and inputs of ``FullyShardedDataParallel`` in mixed precision: which are cast, when, and what is saved."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp1_flat_subjects import BOTH
from fsdp1_subjects import quietly
from harness import on_ranks
from subjects import seeded

LOW = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)


class Buffered(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("table", torch.full((5,), 1.125))
        self.register_buffer("count", torch.ones(1, dtype=torch.long))
        self.inner = inner
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.table.dtype, self.count.dtype))
        x = self.linear(x) + self.table.to(x.dtype)
        return x if self.inner is None else self.inner(x)


def dtypes_of(model):
    return {name.replace("_fsdp_wrapped_module.", ""): buffer.dtype for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, comm=("gloo",))
def test_buffers_are_cast_in_the_first_forward_as_the_nearest_wrapper_says(use_orig_params):
    outcomes = []
    for make in BOTH:
        policies = [MixedPrecision(buffer_dtype=dtype) for dtype in (torch.bfloat16, torch.float64, None)]
        inner = None
        for policy in reversed(policies):
            inner = quietly(make, nn.Sequential(Buffered(inner)), mixed_precision=policy, use_orig_params=use_orig_params)
        steps = [dtypes_of(inner)]
        inner(torch.ones(2, 5))
        steps.append(dtypes_of(inner))
        inner[0].table.data = inner[0].table.to(torch.float16)  # by the program: once is enough
        inner(torch.ones(2, 5))
        steps.append(dtypes_of(inner))
        saved = quietly(inner.state_dict)
        steps += [{name: value.dtype for name, value in saved.items() if name in steps[0]}, dtypes_of(inner)]
        outcomes.append(steps)
    ours, theirs = outcomes
    assert ours == theirs
    assert set(ours[0].values()) == {torch.float32, torch.long} and ours[3] == ours[0] and ours[4] == ours[2]
    assert ours[2]["0.table"] == torch.float16 and ours[2]["0.inner.0.table"] == torch.float64


@on_ranks(2, comm=("gloo",))
def test_batch_norm_is_in_full_precision():
    for make in BOTH:
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        with pytest.warns(UserWarning, match="wrapped as separate FSDP .* with mixed precision disabled"):
            model = make(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=LOW)
        norm = model[1]
        assert type(norm) is type(model)
        model(torch.ones(4, 5)).float().sum().backward()
        assert norm.running_mean.dtype == torch.float32 and norm.mixed_precision.param_dtype is None
        assert norm._flat_param.dtype == norm._flat_param.grad.dtype == torch.float32
        low = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, _module_classes_to_ignore=())
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        model = make(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=low)
        model(torch.ones(4, 5))
        assert type(model[1]) is nn.BatchNorm1d and model[1].running_mean.dtype == torch.bfloat16


@on_ranks(2, comm=("gloo",))
def test_what_is_ignored_is_neither_cast_nor_copied():
    for make in BOTH:
        model = seeded(lambda: nn.Sequential(Buffered(), Buffered()))
        model = make(model, ignored_modules=[model[1]], mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        model(torch.ones(2, 5)).sum().backward()
        assert model[0].table.dtype == torch.bfloat16 and model[1].table.dtype == torch.float32
        assert model[1].linear.weight.grad is not None and model[1].linear.weight.dtype == torch.float32
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with quietly(type(model).state_dict_type, model, kind):
                state = quietly(model.state_dict, prefix="of.")
            for name in ("linear.weight", "linear.bias", "table", "count"):
                assert state[f"of.1.{name}"].data_ptr() == model[1].state_dict()[name].data_ptr(), name
            assert state["of.0.table"].dtype == torch.float32


class Embedded(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.table = nn.Embedding(5, 5)
        self.blocks = nn.ModuleList([wrap(Buffered()) for _ in range(2)])
        self.seen = []

    def forward(self, ids, x, scale):
        self.seen.append((ids.dtype, x.dtype, type(scale)))
        x = self.table(ids) + x * scale
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2, comm=("gloo",))
def test_inputs_are_cast_once_and_integers_never():
    """Also where a forward is computed again in backward."""
    for nested in (MixedPrecision(torch.bfloat16, cast_forward_inputs=True), MixedPrecision(torch.bfloat16)):
        outcomes = []
        for make in BOTH:
            blocks = []

            def checkpointed(module):
                blocks.append(module)
                return checkpoint_wrapper(make(module, mixed_precision=nested))

            model = seeded(lambda: Embedded(checkpointed))
            model = make(model, mixed_precision=MixedPrecision(torch.bfloat16))
            x = torch.ones(2, 5, requires_grad=True)
            output = model(torch.tensor([1, 2]), x, 2.0)
            output.float().sum().backward()
            outcomes.append((output.dtype, x.grad.dtype, model.module.seen, [block.seen for block in blocks]))
            assert all(len(block.seen) == 2 for block in blocks)
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][2] == [(torch.long, torch.bfloat16, float)]
