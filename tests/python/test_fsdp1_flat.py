"""``FullyShardedDataParallel`` with one flat parameter a wrapper, PyTorch's default."""

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FlatParameter, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import libfsdp
from fsdp1_subjects import cleaned, loss_of, quietly, reference_backward, summoned, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FSDP = libfsdp.FullyShardedDataParallel
TORCH = functools.partial(torch_fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"))
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
def test_what_is_registered():
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        prefix = "_fsdp_wrapped_module."
        assert [name for name, _ in model.named_parameters()] == [
            f"{prefix}_flat_param", f"{prefix}1.{prefix}_flat_param"
        ]  # fmt: skip
        flat = model._fsdp_wrapped_module._parameters["_flat_param"]
        assert all(isinstance(flat, kind) for kind in (FlatParameter, nn.Parameter))
        assert flat is model._flat_param and flat.is_leaf and flat.requires_grad
        assert not model[0]._parameters and not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    model = wrapped(seeded(blocks), FSDP)
    assert torch.equal(model[0].weight, seeded(blocks)[0].weight)
    assert not model._flat_param.requires_grad_(False).requires_grad


@on_ranks(1, 2, 3, comm=("shm",))
def test_whole_parameters_for_a_while():
    for wrap in BOTH:
        model, reference = wrapped(seeded(blocks), wrap), seeded(blocks)
        with summoned(model):
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
            assert model[0].weight is dict(model.named_parameters())["0.weight"]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(2)
        check_flats(model, reference, model.sharding_strategy)
        torch.testing.assert_close(loss_of(model, rows(0, 5)), loss_of(reference, rows(0, 5)))
        with summoned(model, writeback=model.sharding_strategy is ShardingStrategy.NO_SHARD), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 if model.sharding_strategy is ShardingStrategy.NO_SHARD else 0)
        check_flats(model, reference, model.sharding_strategy)
        with summoned(model, recurse=False):
            names = [cleaned(name) for name, _ in model.named_parameters()]
            assert names == ["0.weight", "0.bias", "1._flat_param", "2.weight", "2.bias"]
        with pytest.raises(NotImplementedError, match="with_grads=True, use_orig_params=False"):
            with summoned(model, with_grads=True):
                pass


@on_ranks(2, comm=("shm",))
def test_whole_parameters_on_the_first_rank_only():
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        for offload in (False, True) if wrap is FSDP else (False,):  # to where they are, on a CPU
            with summoned(model, rank0_only=True, writeback=False, offload_to_cpu=offload):
                if dist.get_rank() == 0:
                    assert [tuple(p.shape) for p in model[0].parameters()] == [(7, 5), (7,)]
                else:
                    assert len(list(model.parameters())) == 2
                    assert all(isinstance(parameter, FlatParameter) for parameter in model.parameters())
        check_flats(model, seeded(blocks))


@on_ranks(2, 3, comm=("shm",))
def test_padding_stays_zero():
    for wrap in BOTH:
        model = wrap(nn.Linear(1, 1, bias=False))
        with summoned(model), torch.no_grad():
            model.weight.fill_(5)
        assert model._flat_param.tolist() == [5.0 if dist.get_rank() == 0 else 0.0]


@on_ranks(2, comm=("shm",))
def test_the_summon_of_fully_shard_is_another_one():
    model = wrapped(seeded(blocks), FSDP)
    with pytest.raises(NotImplementedError, match="use FullyShardedDataParallel.summon_full_params"):
        with libfsdp.summon_full_params(model):
            pass
    check_flats(model, seeded(blocks))


@on_ranks(2, comm=("shm",))
def test_parameters_assigned_while_they_are_whole():
    model = wrapped(seeded(blocks), FSDP)
    with summoned(model):
        model[0].weight = nn.Parameter(torch.full((7, 5), 3.0))
        model[2].bias.data = torch.full((3,), 4.0)
    assert torch.equal(model[0].weight, torch.full((7, 5), 3.0))
    assert torch.equal(model[2].bias, torch.full((3,), 4.0))
    assert [name for name, _ in model[0].named_parameters()] == []


@on_ranks(2, comm=("shm",))
def test_a_part_alone_is_neither_replaced_nor_frozen():
    model = wrapped(seeded(blocks), FSDP)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="'weight' is part of a flat parameter and cannot be replaced"):
        model[0].weight = nn.Parameter(torch.zeros(7, 5))
    with pytest.raises(RuntimeError, match="cannot be frozen, or trained, alone"):
        model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="has no gradient of its own"):
        model[0].weight.register_post_accumulate_grad_hook(print)
    model[0].weight.requires_grad = False
    with pytest.raises(RuntimeError, match="trained or frozen as a whole"):
        loss_of(model, rows(0, 5))
    model[0].weight.requires_grad = True
    assert torch.equal(model[0].weight, before)
    dist.barrier()
    with torch.no_grad():
        model[0].weight += 1
    assert torch.equal(model[0].weight, before + 1)
    model[0].weight.data = before
    loss_of(model, rows(0, 5))
    assert torch.equal(model[0].weight, before)


@on_ranks(2, comm=("shm", "gloo"))
def test_changes_of_the_flat_parameters_data():
    ours, theirs = (wrap(nn.Linear(5, 7)) for wrap in BOTH)
    for model in (ours, theirs):
        flat = model._flat_param
        assert flat.numel() == 21
        flat.data = torch.ones(21)
        assert torch.equal(model(torch.ones(1, 5)).detach(), torch.full((1, 7), 6.0))
        assert model._flat_param is flat
    with torch.no_grad():
        for factor in (2, 4):
            ours._flat_param.mul_(2)
            assert torch.equal(ours(torch.ones(1, 5)), torch.full((1, 7), 6.0 * factor))
    model = FSDP(nn.Linear(5, 7))
    model.module._flat_param = nn.Parameter(torch.ones(21))
    model(torch.ones(1, 5)).sum().backward()
    assert torch.equal(model._flat_param.grad, torch.ones(21)) and isinstance(model._flat_param, FlatParameter)
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert not model(torch.ones(1, 5)).any()
    model.module._flat_param = nn.Parameter(torch.ones(20))
    with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
        model(torch.ones(1, 5))


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


@on_ranks(1, 2, 3, comm=("shm", "gloo"))
def test_state_dicts():
    reference = seeded(blocks)
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        state = model.state_dict()
        assert list(state) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value), name
        assert [type(p) for p in flats_of(model)] == [nn.Parameter, nn.Parameter]
        other = wrapped(seeded(blocks), wrap)
        with torch.no_grad():
            for flat in other.parameters():
                flat.zero_()
        dist.barrier()
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        check_flats(other, reference, other.sharding_strategy)
        state["extra"] = state.pop("0.weight")
        keys = other.load_state_dict(state, strict=False)
        assert (keys.missing_keys, keys.unexpected_keys) == (["0.weight"], ["extra"])
        with pytest.raises(RuntimeError, match="size mismatch for .*2.bias"):
            other.load_state_dict({"2.bias": torch.ones(7)}, strict=False)
        check_flats(other, reference, other.sharding_strategy)
        assert len(list(other.parameters())) == 2


@on_ranks(2, comm=("shm",))
def test_loading_takes_parameters_over():
    """With ``assign=True`` too, which PyTorch's class loses; an exception in the middle leaves nothing behind."""
    model, reference = wrapped(seeded(blocks), FSDP), seeded(blocks)
    twice = {name: 2 * value for name, value in reference.state_dict().items()}
    model.load_state_dict(twice, assign=True)
    reference.load_state_dict(twice)
    check_flats(model, reference)

    def fail(*_arguments):
        raise KeyError("in a hook")

    handle = model[2].register_load_state_dict_pre_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        model.load_state_dict(twice)
    handle.remove()
    check_training(model, reference)


class Interleaved(nn.Module):
    """A parameter to be ignored between others, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.ignored, self.last = (nn.Parameter(torch.randn(5)) for _ in range(3))
        self.register_buffer("offset", torch.ones(5))
        self.inner = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.inner(x * self.first * self.ignored + self.last + self.offset)


@on_ranks(2, comm=("shm",))
def test_ignored_parameters_keep_their_places():
    for wrap in BOTH:
        model, reference = seeded(Interleaved), seeded(Interleaved)
        ignored = model.ignored
        model = wrap(model, ignored_states=[ignored])
        assert {cleaned(name) for name, _ in model.named_parameters()} == {"ignored", "_flat_param"}
        assert model.module._parameters["ignored"] is ignored and model._flat_param.numel() == 10
        assert sorted(model.state_dict()) == sorted(reference.state_dict())
        if wrap is FSDP:
            assert list(model.state_dict()) == list(reference.state_dict())
            with summoned(model):
                assert list(dict(model.named_parameters())) == list(dict(reference.named_parameters()))
        model.load_state_dict(reference.state_dict())
        model(torch.randn(3, 5)).sum().backward()
        assert ignored.grad is not None and model._flat_param.grad is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@on_ranks(2, 3, comm=("shm",))
def test_tied_parameters():
    reference, x = seeded(Tied), torch.arange(4)
    for units in ("one", "several"):
        for wrap in BOTH if units == "one" else (FSDP,):  # PyTorch's class unties those of several
            model = seeded(Tied)
            if units == "several":
                model.embed = wrap(model.embed)
            model = wrap(model)
            assert sum(p.numel() for p in model.parameters()) <= (42 + 2 * dist.get_world_size()) / dist.get_world_size()
            assert sorted(model.state_dict()) == sorted(reference.state_dict())
            assert wrap is TORCH or list(model.state_dict()) == list(reference.state_dict())
            model.load_state_dict(seeded(Tied).state_dict())
            keys = model.load_state_dict({}, strict=False).missing_keys
            assert sorted(keys) == ["embed.weight", "head.bias", "head.weight"]
            reference = seeded(Tied)
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
            for _ in range(2):
                losses = [each(x).pow(2).mean() for each in (model, reference)]
                assert torch.equal(*losses)
                for loss, optimizer in zip(losses, optimizers):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with summoned(model):
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(ours, theirs)
                assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


@on_ranks(2, comm=("gloo",))
def test_what_cannot_be_flattened():
    def frozen():
        model = seeded(blocks)
        model[0].bias.requires_grad_(False)
        return model

    def double():
        model = seeded(blocks)
        model[0].bias.data = model[0].bias.data.double()
        return model

    def integer():
        model = nn.Linear(5, 7)
        model.count = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)
        model.weight.requires_grad_(False), model.bias.requires_grad_(False)
        return nn.Sequential(nn.Module(), model)

    policy = ModuleWrapPolicy({nn.Linear})
    for wrap in BOTH:
        with pytest.raises(ValueError, match="Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"):
            wrap(frozen())
        with pytest.raises(ValueError, match="has both parameters with requires_grad=True and False"):
            wrap(frozen(), auto_wrap_policy=policy)
        with pytest.raises(ValueError, match="Must flatten tensors with uniform dtype but got torch.float32 and torch.float64"):
            wrap(double())
        with pytest.raises(ValueError, match="integer dtype|uniform dtype"):
            wrap(integer())
        with pytest.raises(ValueError, match="doesn't support scalar parameters. Change 0.scalar to a 1D tensor"):
            model = nn.Sequential(nn.Linear(5, 7))
            model[0].scalar = nn.Parameter(torch.tensor(1.0))
            wrap(model)


@on_ranks(2, comm=("gloo",))
def test_modules_without_parameters():
    for wrap in BOTH:
        model = wrap(nn.Sequential(nn.ReLU(), wrap(nn.Tanh())))
        assert not list(model.parameters()) and not list(model.state_dict())
        assert torch.equal(model(torch.ones(2)), torch.ones(2).tanh())
        with summoned(model):
            pass
        model = wrap(nn.Sequential(wrap(nn.Linear(5, 7)), nn.ReLU()))
        assert [cleaned(name) for name, _ in model.named_parameters()] == ["0._flat_param"]
        model(torch.ones(2, 5)).sum().backward()
        assert model[0]._flat_param.grad is not None


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


@on_ranks(2, comm=("shm",))
def test_applying_a_function():
    def initialize(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(2)
                assert module.weight.dim() == 2

    for wrap in BOTH:
        model, reference = wrapped(seeded(blocks), wrap), seeded(blocks)
        assert model.apply(initialize) is model
        check_flats(model, reference.apply(initialize))


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
def test_checkpoints_and_wrappers_in_wrappers():
    for wrap in BOTH:
        for make in (lambda: wrap(checkpoint_wrapper(seeded(blocks))), lambda: wrap(wrap(seeded(blocks)))):
            model, reference = make(), seeded(blocks)
            assert [name.split(".")[-1] for name, _ in model.named_parameters()] == ["_flat_param"]
            assert list(model.state_dict()) == list(reference.state_dict())
            torch.testing.assert_close(loss_of(model, rows(0, 5)), loss_of(reference, rows(0, 5)))
            with summoned(model):
                assert len(list(model.parameters())) == len(list(reference.parameters()))
        outer = nn.Sequential(wrap(seeded(blocks)))
        assert list(outer.state_dict()) == [f"0.{name}" for name in reference.state_dict()]


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
    model = wrapped(seeded(blocks), FSDP)
    loss_of(model, mine(rows(0, 5))).backward()
    references = [weakref.ref(each) for each in (model, model.module, model[0])]
    gc.collect()
    gc.disable()
    del model
    assert all(reference() is None for reference in references)
    gc.enable()
