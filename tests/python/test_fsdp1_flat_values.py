"""What ``FullyShardedDataParallel`` registers where it shows one flat parameter a wrapper, and what of it is shown whole."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import libfsdp
from fsdp1_flat_subjects import BOTH, FSDP, TORCH, blocks, check_flats, check_training, flats_of
from fsdp1_subjects import cleaned, loss_of, summoned, wrapped
from harness import on_ranks
from subjects import rows, seeded

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


@on_ranks(2, 3, comm=("shm", "gloo"))
def test_writes_that_no_operator_shows_between_evaluations():
    for use_orig_params in (False, True):
        model, reference = wrapped(seeded(blocks), FSDP, use_orig_params=use_orig_params), seeded(blocks)
        batch = rows(0, 5)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(batch), reference(batch), rtol=0, atol=0)
                model.note_shard_writes()
                for parameter in model.parameters():
                    parameter.data.numpy()[...] *= 2
                for parameter in reference.parameters():
                    parameter.mul_(2)


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
