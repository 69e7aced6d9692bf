"""Modules in wrappers that save and load in ways of their own: by hooks, or by methods that they override. They find whole
parameters, and what they make of values is what is saved and loaded, as with PyTorch's class."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

import libfsdp
import on_gpus
from fsdp1_subjects import loss_of, quietly
from harness import on_ranks
from subjects import mine, rows, seeded

FSDP = libfsdp.FullyShardedDataParallel
TORCH = functools.partial(torch_fsdp.FullyShardedDataParallel, device_id=on_gpus.device())
BOTH = (FSDP, TORCH)
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
SHAPE = (5, 5)
WEIGHT = torch.arange(25.0).view(SHAPE)


def linear():
    layer = nn.Linear(*SHAPE)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
        layer.bias.copy_(torch.arange(5.0))
    return layer


def in_wrapper(layer, wrap, use_orig_params):
    return quietly(wrap, nn.Sequential(layer), use_orig_params=use_orig_params)


def weight_of(model):
    with quietly(type(model).summon_full_params, model):
        return model.module[0].weight.detach().clone()


class Transposed(nn.Linear):
    """In files its weight lies the other way."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t()

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Copying(nn.Linear):
    """Loads past ``Module``'s own way."""

    def _load_from_state_dict(self, state_dict, prefix, *_):
        with torch.no_grad():
            self.weight.copy_(2 * state_dict[prefix + "weight"])
            self.bias.copy_(state_dict[prefix + "bias"])


class Counted(nn.Linear):
    """Has a state that it works out of its parameters."""

    def get_extra_state(self):
        return sum(parameter.numel() for parameter in self.parameters())

    def set_extra_state(self, state):
        assert state == sum(parameter.numel() for parameter in self.parameters())


def concatenate(module, state_dict, prefix, *_):
    state_dict[prefix + "weight"] = torch.cat([state_dict.pop(prefix + name) for name in ("q", "k")])


LOADS = {
    "rows in another order": (
        {"weight": WEIGHT.flip(0)},
        lambda module, state, prefix, *_: state.__setitem__(prefix + "weight", state[prefix + "weight"].flip(0)),
    ),
    "another name": (
        {"w": WEIGHT},
        lambda module, state, prefix, *_: state.__setitem__(prefix + "weight", state.pop(prefix + "w")),
    ),
    "parts": ({"q": WEIGHT[:2], "k": WEIGHT[2:]}, concatenate),
}


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_hooks_that_change_what_is_loaded(use_orig_params):
    for what, (saved, hook) in LOADS.items():
        for wrap in BOTH:
            layer, shapes = nn.Linear(*SHAPE), []
            layer.register_load_state_dict_pre_hook(hook)
            layer.register_load_state_dict_post_hook(
                lambda module, _, shapes=shapes: shapes.append([tuple(p.shape) for p in module.parameters()])
            )
            model = in_wrapper(layer, wrap, use_orig_params)
            state = {f"0.{name}": value for name, value in {**saved, "bias": torch.ones(5)}.items()}
            assert str(quietly(model.load_state_dict, state)) == "<All keys matched successfully>", what
            assert torch.equal(weight_of(model), WEIGHT), (what, wrap)
            assert shapes == [[SHAPE, (5,)]], what


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_rows_under_another_name_are_loaded(use_orig_params):
    source, layer = in_wrapper(linear(), FSDP, use_orig_params), nn.Linear(*SHAPE)
    layer.register_load_state_dict_pre_hook(LOADS["another name"][1])
    model = in_wrapper(layer, FSDP, use_orig_params)
    with quietly(FSDP.state_dict_type, source, SHARDED), quietly(FSDP.state_dict_type, model, SHARDED):
        state = source.state_dict()
        state["0.w"] = state.pop("0.weight")
        model.load_state_dict(state)
    assert torch.equal(weight_of(model), WEIGHT)


def doubled_in_half(module, state_dict, prefix, _metadata):
    state_dict[prefix + "weight"] = (2 * state_dict[prefix + "weight"]).bfloat16()


def with_its_maximum(module, state_dict, prefix, _metadata):
    state_dict[prefix + "scale"] = state_dict[prefix + "weight"].abs().max()


def in_two_parts(module, state_dict, prefix, _metadata):
    state_dict[prefix + "q"], state_dict[prefix + "k"] = state_dict.pop(prefix + "weight").split([2, 3])


SAVES = {
    doubled_in_half: {"weight": (2 * WEIGHT).bfloat16()},
    with_its_maximum: {"weight": WEIGHT, "scale": WEIGHT.max()},
    in_two_parts: {"q": WEIGHT[:2], "k": WEIGHT[2:]},
}


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_hooks_that_change_what_is_saved(use_orig_params):
    """What they made stays when training goes on. On no rank alone is there a part without elements to look at."""
    for hook, expected in SAVES.items():
        for config in (None, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            layer = linear()
            layer._register_state_dict_hook(hook)
            model = in_wrapper(layer, FSDP, use_orig_params)
            with quietly(FSDP.state_dict_type, model, FULL, config):
                state = quietly(model.state_dict)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            dist.barrier()
            if config is not None and dist.get_rank() > 0:
                assert not state
                continue
            for name, value in expected.items():
                assert state[f"0.{name}"].dtype == value.dtype and torch.equal(state[f"0.{name}"], value), (hook, name)
            assert len(state) == len(expected) + 1


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3, comm=("shm",))
def test_hooks_that_change_what_is_saved_in_rows(use_orig_params):
    states = []
    for wrap in BOTH:
        layer = linear()
        layer._register_state_dict_hook(doubled_in_half)
        model = in_wrapper(layer, wrap, use_orig_params)
        with quietly(type(model).state_dict_type, model, SHARDED):
            states.append(model.state_dict()["0.weight"])
    assert all(isinstance(state, ShardedTensor) and state.dtype == torch.bfloat16 for state in states)
    ours, theirs = ([shard.tensor for shard in state.local_shards()] for state in states)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3)
def test_modules_with_methods_of_their_own(use_orig_params):
    saved = {"0.weight": WEIGHT, "0.bias": torch.zeros(5)}
    for wrap in BOTH:
        model = in_wrapper(Transposed(*SHAPE), wrap, use_orig_params)
        quietly(model.load_state_dict, dict(saved))
        assert torch.equal(weight_of(model), WEIGHT.t())
        assert torch.equal(quietly(model.state_dict)["0.weight"], WEIGHT)
        model = in_wrapper(Copying(*SHAPE), wrap, use_orig_params)
        quietly(model.load_state_dict, dict(saved))
        assert torch.equal(weight_of(model), 2 * WEIGHT)
        model = in_wrapper(Counted(*SHAPE), wrap, use_orig_params)
        state = quietly(model.state_dict)
        assert state["0._extra_state"] == 30
        quietly(model.load_state_dict, state)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3, comm=("shm",))
def test_files_of_the_former_weight_norm(use_orig_params):
    former = nn.Sequential(quietly(nn.utils.weight_norm, linear()))
    model = in_wrapper(nn.utils.parametrizations.weight_norm(nn.Linear(*SHAPE)), FSDP, use_orig_params)
    quietly(model.load_state_dict, former.state_dict())
    batch = rows(0, 5)
    torch.testing.assert_close(model(batch), former(batch))


class Tied(nn.Module):
    """A weight that two wrappers read."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1, 2, 3, comm=("shm",))
def test_weights_that_are_tied_between_wrappers(use_orig_params):
    model, reference = seeded(Tied), seeded(Tied)
    model.first = quietly(FSDP, model.first, use_orig_params=use_orig_params)
    model = quietly(FSDP, model, use_orig_params=use_orig_params)
    state = {name: 2 * value for name, value in reference.state_dict().items()}
    quietly(model.load_state_dict, dict(state))
    reference.load_state_dict(state)
    saved = quietly(model.state_dict)
    assert list(saved) == list(state) and all(torch.equal(saved[name], state[name]) for name in state)
    registered = [list(module._parameters) for module in model.modules()]
    with FSDP.summon_full_params(model):
        assert all(torch.equal(value, state[name]) for name, value in quietly(model.state_dict).items())
    with FSDP.summon_full_params(model, recurse=False):
        assert all(torch.equal(value, state[name]) for name, value in quietly(model.state_dict).items())
    assert [list(module._parameters) for module in model.modules()] == registered
    torch.testing.assert_close(model(rows(0, 5)), reference(rows(0, 5)), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="last.weight"):
        quietly(model.load_state_dict, {name: value for name, value in state.items() if name != "last.weight"})


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm", "gloo"))
def test_a_hook_that_raises_leaves_nothing_behind(use_orig_params):
    def fail(*_arguments):
        raise KeyError("in a hook")

    model, reference = in_wrapper(linear(), FSDP, use_orig_params), nn.Sequential(linear())
    names = [name for name, _ in model.named_parameters()]
    for register, call in (
        (model.module[0].register_load_state_dict_pre_hook, lambda: model.load_state_dict(reference.state_dict())),
        (model.module[0]._register_state_dict_hook, lambda: model.state_dict()),
        (model.module[0]._register_state_dict_hook, lambda: nn.ModuleList([model]).state_dict()),
        (model.module[0].register_load_state_dict_pre_hook, lambda: nn.Module.load_state_dict(model, model.state_dict())),
    ):
        handle = register(fail)
        with pytest.raises(KeyError, match="in a hook"):
            call()
        handle.remove()
        loss_of(model, mine(rows(0, 5))).backward()
        assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(weight_of(model), WEIGHT)


@on_ranks(1, 2, 3, comm=("shm",))
def test_what_is_assigned_while_parameters_are_whole_is_taken():
    """By ``load_state_dict(assign=True)`` too; every face."""
    for use_orig_params in (False, True):
        model = in_wrapper(linear(), FSDP, use_orig_params)
        quietly(model.load_state_dict, {"0.weight": 2 * WEIGHT, "0.bias": torch.zeros(5)}, assign=True)
        assert torch.equal(weight_of(model), 2 * WEIGHT)
        before = list(model.parameters())
        with FSDP.summon_full_params(model):
            model.module[0].weight = nn.Parameter(3 * WEIGHT)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert torch.equal(weight_of(model), 3 * WEIGHT)
    layer = libfsdp.fully_shard(linear())
    with libfsdp.summon_full_params(layer):
        layer.weight = nn.Parameter(3 * WEIGHT)
    assert torch.equal(layer.weight, 3 * WEIGHT)
