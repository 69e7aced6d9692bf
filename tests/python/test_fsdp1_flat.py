"""``FullyShardedDataParallel`` with one flat parameter a wrapper, PyTorch's default: how it trains."""

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FlatParameter, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp1_flat_subjects import (
    BOTH,
    FSDP,
    STRATEGIES,
    blocks,
    check_flats,
    check_training,
    flats_of,
    share_of,
    units_of,
)
from fsdp1_subjects import loss_of, reference_backward, summoned, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded


@pytest.mark.meet(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2, 3, 4)
def test_trains_as_the_unsharded_model(strategy, offload):
    model = wrapped(seeded(blocks), FSDP, sharding_strategy=strategy, cpu_offload=CPUOffload(offload))
    check_training(model, seeded(blocks), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, 3, comm=("gloo",))
def test_trains_as_pytorchs(strategy):
    ours, theirs = (wrapped(seeded(blocks), wrap, sharding_strategy=strategy) for wrap in BOTH)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for step in range(3):
        losses = [loss_of(model, mine(rows(step, 5))) for model in (ours, theirs)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers):
            loss.backward()
            optimizer.step()
        for (name, flat), (other, theirs_flat) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == other
            assert flat.shape == theirs_flat.shape
            torch.testing.assert_close(flat.data, theirs_flat.data)
            torch.testing.assert_close(flat.grad, theirs_flat.grad)
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(2)
def test_a_flat_parameter_moves_to_memory_that_processes_share():
    """Its storage stays the same, and gets other memory."""
    model = wrapped(seeded(blocks), FSDP)
    for flat in model.parameters():
        former = flat.data_ptr()
        flat.share_memory_()
        assert flat.data_ptr() != former
    check_training(model, seeded(blocks), STRATEGIES[0])


@on_ranks(2, comm=("shm",))
def test_every_optimizer_trains():
    optim = torch.optim
    makers = [
        functools.partial(kind, lr=1e-2)
        for kind in (
            optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
            optim.RMSprop, optim.Rprop, optim.SGD,
        )
    ]  # fmt: skip
    makers += [functools.partial(optim.AdamW, lr=1e-2, fused=True), functools.partial(optim.AdamW, lr=1e-2, foreach=False)]
    for make in makers:
        model, reference = wrapped(seeded(blocks), FSDP), seeded(blocks)
        ours, theirs = make(model.parameters()), make(reference.parameters())
        for step in range(2):
            loss_of(model, mine(rows(step, 5))).backward()
            reference_backward(reference, rows(step, 5))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for flat, params in zip(flats_of(model), units_of(reference), strict=True):
            torch.testing.assert_close(flat.detach(), share_of(params, None))


@on_ranks(4, comm=("shm", "gloo"))
def test_hybrid_strategies():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy, device_mesh=mesh) for wrap in BOTH]
        for step in range(2):
            for model in models:
                loss_of(model, mine(rows(step, 5))).backward()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours.data, theirs.data)
            torch.testing.assert_close(ours.grad, theirs.grad)


@on_ranks(2, comm=("gloo",))
def test_freezing_the_flat_parameter():
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        model[1]._flat_param.requires_grad_(False)
        loss_of(model, mine(rows(0, 5))).backward()
        assert model[1]._flat_param.grad is None and model._flat_param.grad is not None
        model[1]._flat_param.requires_grad_(True)
        loss_of(model, mine(rows(0, 5))).backward()
        assert model[1]._flat_param.grad is not None


@on_ranks(2, comm=("gloo",))
def test_units_that_nobody_used_have_no_gradient():
    class Half(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    for wrap in BOTH:
        model = wrap(Half(wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 5)), nn.Linear(5, 5)))
        model(torch.ones(2, 5)).sum().backward()
        assert [flat.grad is None for flat in model.parameters()] == [True, False, True]
        model = wrap(Half(nn.Linear(5, 5), nn.Linear(5, 5)))
        (model(torch.ones(2, 5)).sum() * 0).backward()
        assert model._flat_param.grad is not None and not model._flat_param.grad.any()


@on_ranks(2, comm=("gloo",))
def test_clipping():
    for norm_type in (1, 2, float("inf")):
        ours, theirs = (wrapped(seeded(blocks), wrap) for wrap in BOTH)
        for model in (ours, theirs):
            loss_of(model, mine(rows(0, 5))).backward()
        norms = [model.clip_grad_norm_(0.01, norm_type) for model in (ours, theirs)]
        torch.testing.assert_close(*norms)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    for strategy in STRATEGIES:
        models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy) for wrap in BOTH]
        for model in models:
            loss_of(model, mine(rows(0, 5))).backward()
        torch.testing.assert_close(*(model.clip_grad_norm_(0.01) for model in models))


@on_ranks(2, comm=("gloo",))
def test_the_norm_of_gradients_of_several_dtypes():
    norms = []
    for wrap in BOTH:
        model = wrap(nn.Sequential(wrap(nn.Linear(5, 5).bfloat16()), nn.Linear(5, 5)))
        for flat in model.parameters():
            flat.grad = torch.full_like(flat, 2)
        norms.append(model.clip_grad_norm_(1.0))
    assert [norm.dtype for norm in norms] == [torch.float32, torch.float32]
    torch.testing.assert_close(*norms)


@on_ranks(2, comm=("shm", "gloo"))
def test_gradient_accumulation():
    for strategy in STRATEGIES:
        for synced in ([False, True], [True, True], [False, True, False, True]):
            models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy) for wrap in BOTH]
            for step, sync in enumerate(synced):
                for model in models:
                    if sync:
                        loss_of(model, mine(rows(step, 5))).backward()
                    else:
                        with model.no_sync():
                            loss_of(model, mine(rows(step, 5))).backward()
            for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


@on_ranks(2, comm=("shm", "gloo"))
def test_other_dtypes_after_wrapping():
    for dtype in (torch.bfloat16, torch.float64):
        models = [wrap(seeded(lambda: nn.Linear(5, 7))) for wrap in BOTH]
        models = [model.to(dtype) for model in models]
        assert models[0].weight.dtype == dtype
        for model in models:
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        ours, theirs = (model._flat_param for model in models)
        assert ours.dtype == theirs.dtype == ours.grad.dtype == dtype
        assert torch.equal(ours.data, theirs.data) and torch.equal(ours.grad, theirs.grad)
        assert isinstance(ours, FlatParameter)


@on_ranks(2, comm=("shm",))
def test_other_dtypes_in_other_tensors():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model, x = FSDP(seeded(lambda: nn.Linear(5, 7))).double(), torch.ones(1, 5, dtype=torch.float64)
    before = model(x).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(x).detach(), before - 6)


@on_ranks(2, 3, comm=("shm",))
def test_synced_module_states():
    torch.manual_seed(dist.get_rank())
    model = wrapped(blocks(), FSDP, sync_module_states=True)
    torch.manual_seed(0)
    check_flats(model, blocks(), model.sharding_strategy)


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("offset", torch.ones(5))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, tuple(self.inner.weight.shape), self.inner.weight.dtype, self.offset.dtype))
        return self.inner(x) + self.offset


@on_ranks(2, comm=("gloo",))
def test_mixed_precision():
    for policy in (
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float64),
        MixedPrecision(reduce_dtype=torch.bfloat16),
    ):
        outcomes = []
        for wrap in BOTH:
            model = wrap(seeded(Seen), mixed_precision=policy)
            output = model(torch.ones(2, 5))
            output.float().sum().backward()
            state = {name: (value.dtype, value.sum().item()) for name, value in model.state_dict().items()}
            model.load_state_dict(seeded(Seen).state_dict())
            with summoned(model):
                assert model.inner.weight.dtype == torch.float32
                assert torch.equal(model.inner.weight, seeded(Seen).inner.weight)
            flat = model._flat_param
            outcomes.append((output.dtype, model.module.seen, flat.dtype, flat.grad.dtype, flat.grad.sum().item(), state))
        assert outcomes[0] == outcomes[1], policy


@on_ranks(2, comm=("shm",))
def test_wrapping_by_a_policy():
    def untied():
        model = blocks()
        model[1][2].bias = nn.Parameter(torch.randn(9))
        return model

    models = [wrap(seeded(untied), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})) for wrap in BOTH]
    named = [[(name, flat.shape) for name, flat in model.named_parameters()] for model in models]
    assert named[0] == named[1] and len(named[0]) == 5
    for model in models:
        loss_of(model, mine(rows(0, 5))).backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@on_ranks(2, comm=("shm",))
def test_modules_that_list_their_parameters():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 5)
            self.list = nn.ParameterList([torch.randn(5), torch.randn(5)])
            self.dict = nn.ParameterDict({"a": torch.randn(5)})

        def forward(self, x):
            return self.lstm(x)[0] * self.list[0] + self.list[1] + self.dict["a"]

    model, reference = FSDP(seeded(Lists)), seeded(Lists)
    assert list(model.state_dict()) == list(reference.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
    for _ in range(2):
        for each, optimizer in zip((model, reference), optimizers):
            each(torch.ones(2, 1, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    model.double()
    model(torch.ones(2, 1, 5, dtype=torch.float64)).sum().backward()
    assert model._flat_param.grad.dtype == torch.float64


@on_ranks(2, comm=("gloo",))
def test_wrappers_are_of_one_kind():
    for wrap in BOTH:
        model = seeded(blocks)
        model[1] = wrap(model[1], use_orig_params=True)
        model = wrap(model)
        with pytest.raises(ValueError, match="Expects one homogeneous value for _?use_orig_params"):
            loss_of(model, rows(0, 5))


@on_ranks(2, comm=("shm",))
def test_models_are_freed():
    """With all that holds their shards."""
    for use_orig_params in (False, True):
        model = wrapped(seeded(blocks), FSDP, use_orig_params=use_orig_params)
        loss_of(model, mine(rows(0, 5))).backward()
        parts = (model, model.module, model[0], model._fsdp_state, model[1]._fsdp_state)
        references = [weakref.ref(each) for each in parts]
        del parts
        gc.collect()
        gc.disable()
        del model
        assert [reference() for reference in references] == [None] * len(references), use_orig_params
        gc.enable()
