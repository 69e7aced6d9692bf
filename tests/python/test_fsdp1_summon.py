"""``FullyShardedDataParallel.summon_full_params`` and ``apply``: where they show whole parameters, and where they are errors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp1_flat_subjects import BOTH, FSDP
from fsdp1_subjects import loss_of, quietly, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded


def blocks():
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, 3))


class Calls(nn.Module):
    """Calls a function in the middle of its forward, and one in its backward."""

    def __init__(self, in_forward=lambda: None, in_backward=lambda: None):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.in_forward, self.in_backward = in_forward, in_backward

    def forward(self, x):
        self.in_forward()
        hidden = self.inner(x)
        hidden.register_hook(lambda _: self.in_backward())
        return hidden * 2


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_not_in_a_forward_or_backward(use_orig_params):
    for make in BOTH:
        said = []

        def call():
            with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
                with type(model).summon_full_params(model):
                    pass
            said.append(True)

        for where in (dict(in_forward=call), dict(in_backward=call)):
            model = make(seeded(lambda: Calls(**where)), use_orig_params=use_orig_params)
            model(torch.ones(2, 5)).sum().backward()
        assert said == [True, True]
        with type(model).summon_full_params(model):  # between steps
            assert model.inner.weight.shape == (5, 5)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_parameters_of_two_wrappers_that_change_places(use_orig_params):
    layers = [FSDP(nn.Linear(5, 5), use_orig_params=use_orig_params) for _ in range(2)]
    model = FSDP(nn.Sequential(*layers), use_orig_params=use_orig_params)
    first, second = (layer.module for layer in layers)

    def members():
        first.weight, second.weight = second.weight, first.weight

    def aliases():
        kept = nn.Parameter(first.weight.data)
        first.weight = nn.Parameter(second.weight.detach())
        second.weight = kept

    def registered():
        first.weight, second.weight = second._parameters["weight"], first._parameters["weight"]

    def data():
        a, b = first._parameters["weight"], second._parameters["weight"]
        a.data, b.data = b.data, a.data

    def values():
        with FSDP.summon_full_params(model, writeback=False):
            return [layer._parameters["weight"].detach().clone() for layer in (first, second)]

    wanted = values()
    for exchange in (members, aliases, registered, data):
        with FSDP.summon_full_params(model):
            exchange()
        wanted.reverse()
        assert all(map(torch.equal, values(), wanted)), exchange.__name__


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_not_within_one_another(use_orig_params):
    for make in BOTH:
        model = wrapped(seeded(blocks), make, use_orig_params=use_orig_params)
        with type(model).summon_full_params(model):
            with pytest.raises(AssertionError, match="already unsharding parameters"):
                with type(model).summon_full_params(model):
                    pass
            with pytest.raises(ValueError, match="expected to be in states"):
                model.apply(lambda _: None)
        loss_of(model, mine(rows(0, 5))).backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_what_is_not_supported(use_orig_params):
    for make in BOTH:
        model = wrapped(seeded(blocks), make, use_orig_params=use_orig_params)
        kept = quietly(make, seeded(blocks), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params)
        calls = [
            (model, dict(rank0_only=True, writeback=True)),
            (model, dict(with_grads=True, offload_to_cpu=True)),
            (kept, dict(offload_to_cpu=True)),
        ]
        for given, options in calls:
            with pytest.raises(NotImplementedError, match="is not supported"):
                with quietly(type(given).summon_full_params, given, **options):
                    pass
        assert FSDP is not make or model.training_state == kept.training_state


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_of_plain_modules(use_orig_params):
    for make in BOTH:
        first, last = (make(seeded(lambda: nn.Linear(5, 5)), use_orig_params=use_orig_params) for _ in range(2))
        layers = nn.Sequential(first, nn.ReLU(), last)
        with type(first).summon_full_params(layers):
            assert [tuple(parameter.shape) for parameter in layers.parameters()] == [(5, 5), (5,)] * 2
            with torch.no_grad():
                for parameter in layers.parameters():
                    parameter.fill_(1)
        with type(first).summon_full_params(layers, recurse=False):
            assert all(parameter.dim() == 1 for parameter in layers.parameters())
        with type(first).summon_full_params(nn.ReLU()), type(first).summon_full_params(layers[1]):
            pass
        assert torch.equal(layers(torch.ones(1, 5)), torch.full((1, 5), 31.0))


@on_ranks(2, comm=("shm",))
def test_names_and_values_are_the_unwrapped_models_whatever_the_precision():
    low = MixedPrecision(torch.bfloat16, buffer_dtype=torch.float64)

    def normed():
        return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3)))

    for use_orig_params in (False, True):
        for make in BOTH:
            model, reference = wrapped(seeded(normed), make, use_orig_params=use_orig_params, mixed_precision=low), seeded(normed)
            with type(model).summon_full_params(model):
                for name, parameter in reference.named_parameters():
                    shown = dict(model.named_parameters())[name]
                    assert isinstance(shown, nn.Parameter) and shown.requires_grad
                    assert shown.dtype == torch.float32 and torch.equal(shown, parameter)
                for prefix, recurse in (("", True), ("a", True), ("a", False)):
                    for listed in ("named_parameters", "named_buffers"):
                        ours, theirs = (dict(getattr(m, listed)(prefix, recurse)) for m in (model, reference))
                        assert not recurse or list(ours) == list(theirs)
            assert any("_fsdp_wrapped_module" in name for name, _ in model.named_buffers())


@on_ranks(2, 3, comm=("shm",))
def test_gradients_are_whole_and_written_back():
    for make in BOTH:
        model = wrapped(seeded(blocks), make, use_orig_params=True)
        with type(model).summon_full_params(model, with_grads=True):
            assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, mine(rows(0, 5))).backward()
        for writeback in (True, False):
            with type(model).summon_full_params(model, with_grads=True, writeback=writeback):
                for parameter in model.parameters():
                    assert parameter.grad.shape == parameter.shape
                    parameter.grad.fill_(2 if writeback else 3)
        for parameter in model.parameters():
            assert parameter.grad is None or torch.equal(parameter.grad, torch.full_like(parameter.grad, 2))


@on_ranks(2, 3)
def test_a_gradient_that_one_rank_has_dropped_is_zero_in_its_part():
    def whole_gradients(drops):
        model = wrapped(seeded(blocks), FSDP, use_orig_params=True)
        loss_of(model, mine(rows(0, 5))).backward()
        if drops and dist.get_rank() == 1:
            for parameter in model.parameters():
                parameter.grad = None
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
        assert not (drops and dist.get_rank() == 1) or all(parameter.grad is None for parameter in model.parameters())
        return gradients

    differ = 0
    for all_there, one_dropped in zip(whole_gradients(False), whole_gradients(True), strict=True):
        assert torch.equal(one_dropped, torch.where(one_dropped == 0, 0, all_there))
        differ += (one_dropped != all_there).sum().item()
    assert differ > 0


@on_ranks(2, comm=("shm",))
def test_writes_are_dropped_where_they_are_not_to_be_kept():
    for use_orig_params in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            for make in BOTH:
                model = wrapped(seeded(blocks), make, use_orig_params=use_orig_params, sharding_strategy=strategy)
                before = [parameter.detach().clone() for parameter in model.parameters()]
                with type(model).summon_full_params(model, writeback=False), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
                with type(model).summon_full_params(model), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                assert not any(parameter.any() for parameter in model.parameters())


@on_ranks(2, comm=("shm",))
def test_applied_functions_see_whole_parameters_of_all_modules():
    def note(module):
        seen.append((type(module).__name__, [tuple(p.shape) for p in module.parameters(recurse=False)]))

    for use_orig_params in (False, True):
        outcomes = []
        for make in BOTH:
            seen = []
            wrapped(seeded(blocks), make, use_orig_params=use_orig_params).apply(note)
            outcomes.append([each for each in seen if each[1]])
        assert outcomes[0] == outcomes[1]
        assert ("Linear", [(7, 5), (7,)]) in outcomes[0]


@on_ranks(2)
def test_what_is_frozen_by_apply_is_frozen():
    for make in BOTH:
        model = wrapped(seeded(blocks), make, use_orig_params=True)
        frozen, trained = [part for part in model.modules() if isinstance(part, nn.Linear)][:2]
        model.apply(lambda part, frozen=frozen: part.requires_grad_(False) if part is frozen else None)
        loss_of(model, mine(rows(0, 5))).backward()
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        assert all(parameter.requires_grad for parameter in trained.parameters())
