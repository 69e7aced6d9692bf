"""Optimizers' state dicts of ``FullyShardedDataParallel``: by name, from any wrapping into any, beside PyTorch's own."""

import copy
import functools
import types
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp1_subjects import BOTH, FSDP, TORCH, blocks, loss_of, quietly, reference_backward, wrapped
from harness import on_ranks
from libfsdp import _C
from libfsdp._fsdp1 import optimizer_states
from subjects import mine, rows, seeded

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ADAM = functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True)
OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": ADAM,
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "adamax": functools.partial(torch.optim.Adamax, lr=1e-2),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "asgd": functools.partial(torch.optim.ASGD, lr=1e-2),
}


def class_of(model):
    return type(model) if hasattr(type(model), "optim_state_dict") else FSDP.func


def of_type(model, *settings):
    return quietly(class_of(model).state_dict_type, model, *settings)


def saved(model, optimizer, kind=FULL, config=None, **arguments):
    """On a CPU, PyTorch's gives one tensor several names if it is to offload."""
    config = config or (FullOptimStateDictConfig(offload_to_cpu=False) if kind is FULL else None)
    with of_type(model, kind, None, config):
        return class_of(model).optim_state_dict(model, optimizer, **arguments)


def load(model, optimizer, state, kind=FULL):
    with of_type(model, kind):
        class_of(model).optim_state_dict_to_load(model, optimizer, state, load_directly=True)


def by_names(model, optimizer):
    """An unwrapped model's."""
    return FSDP.func.rekey_optim_state_dict(
        copy.deepcopy(optimizer.state_dict()), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


def grouped(model, make):
    """Weights and biases apart; one weight is trained by nobody."""
    named = [(name, param) for name, param in model.named_parameters() if "2.weight" not in name.split("1.")[0]]
    weights = [param for name, param in named if name.endswith("weight")]
    biases = [param for name, param in named if name.endswith("bias")]
    return make([dict(params=weights), dict(params=biases, lr=0.02)])


def outer(model, wrap, **options):
    """One wrapper for all."""
    return quietly(wrap, model, **options)


def inner(model, wrap, **options):
    """Wrappers within a model that is none: what is between them is trained by each rank for itself."""
    model[1][0] = quietly(wrap, model[1][0], **options)
    model[2] = quietly(wrap, model[2], **options)
    return model


def value_of(value):
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return value.to_local() if isinstance(value, DTensor) else value


def check_same_states(ours, theirs, **tolerance):
    assert ours["state"].keys() == theirs["state"].keys()
    for name, state in ours["state"].items():
        assert state.keys() == theirs["state"][name].keys(), name
        for kind, value in state.items():
            other = theirs["state"][name][kind]
            assert type(value) is type(other), f"{kind} of {name}"
            if isinstance(value, ShardedTensor):
                assert value.metadata() == other.metadata(), f"{kind} of {name}"
            elif isinstance(value, DTensor):
                assert (value.placements, value.device_mesh) == (other.placements, other.device_mesh)
            torch.testing.assert_close(
                value_of(value), value_of(other), msg=lambda said: f"{kind} of {name}: {said}", **tolerance
            )
    assert len(ours["param_groups"]) == len(theirs["param_groups"])
    for group, other in zip(ours["param_groups"], theirs["param_groups"]):
        assert {**group, "params": sorted(group["params"])} == {**other, "params": sorted(other["params"])}


def train(model, optimizer, steps, backward=None):
    """The losses of this rank."""
    losses = []
    for step in steps:
        loss = loss_of(model, mine(rows(step, 5)))
        losses.append(loss.detach())
        loss.backward() if backward is None else backward(model, rows(step, 5))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_reference(model, optimizer, steps):
    return train(model, optimizer, steps, reference_backward)


def reference_of(make, steps=3):
    model = seeded(blocks)
    optimizer = make(model.parameters())
    train_reference(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 3, comm=("shm",))
def test_states_are_the_unwrapped_models(name):
    reference, optimizer = reference_of(OPTIMIZERS[name])
    model = wrapped(seeded(blocks), FSDP)
    ours = OPTIMIZERS[name](model.parameters())
    train(model, ours, range(3))
    state = saved(model, ours)
    check_same_states(state, by_names(reference, optimizer), rtol=0, atol=0)
    load(model, ours, state)
    assert train(model, ours, range(3, 5)) == train_reference(reference, optimizer, range(3, 5))


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2, 3, comm=("gloo",))
def test_states_are_pytorchs(kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for make in (ADAM, OPTIMIZERS["momentum"]):
        for options in ({}, dict(device_mesh=mesh)):
            models = [wrapped(seeded(blocks), wrap, **options) for wrap in BOTH]
            optimizers = [make(model.parameters()) for model in models]
            for model, optimizer in zip(models, optimizers):
                train(model, optimizer, range(2))
            check_same_states(*(saved(*each, kind) for each in zip(models, optimizers)))



def alone():
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def whole_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


WRAPPINGS = {
    "units": lambda: wrapped(seeded(blocks, 2), FSDP),
    "one unit": lambda: outer(seeded(blocks, 2), FSDP),
    "inner units": lambda: inner(seeded(blocks, 2), FSDP),
    "kept whole": lambda: wrapped(seeded(blocks, 2), FSDP, sharding_strategy=ShardingStrategy.NO_SHARD),
    "mesh": lambda: wrapped(seeded(blocks, 2), FSDP, device_mesh=whole_mesh()),
    "group of one": lambda: wrapped(seeded(blocks, 2), FSDP, process_group=alone()),
    "pytorch's": lambda: wrapped(seeded(blocks, 2), TORCH),
}
@pytest.mark.meet(1)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2, 3, comm=("shm",))
def test_from_any_wrapping_into_any(kind):
    """What an unwrapped model's optimizer has goes into each wrapping, is saved there, goes into another one, and that
    one goes on as the unwrapped model does."""
    reference, optimizer = reference_of(ADAM)
    values, state = copy.deepcopy(reference.state_dict()), by_names(reference, optimizer)
    expected = train_reference(reference, optimizer, range(3, 5))
    pairs = [(source, "units") for source in WRAPPINGS] + [("units", target) for target in WRAPPINGS]
    for source, target in pairs:
        given = state
        for name in (source, target):
            model = WRAPPINGS[name]()
            quietly(model.load_state_dict, values)
            ours = ADAM(model.parameters())
            load(model, ours, given, kind)
            given = saved(model, ours, kind)
        if kind is FULL:
            check_same_states(given, state, rtol=0, atol=0)
        if target != "inner units":
            losses = train(model, ours, range(3, 5), reference_backward if target == "group of one" else None)
            exact = target != "pytorch's" or dist.get_world_size() == 2
            said = f"from {source} into {target}: "
            torch.testing.assert_close(
                losses, expected, msg=lambda text: said + text, **(dict(rtol=0, atol=0) if exact else {})
            )


@on_ranks(4, comm=("shm",))
def test_rows_of_another_number_of_ranks(folder=None):
    """Through a checkpoint of four ranks, into wrappers of two."""
    reference, optimizer = reference_of(ADAM)
    model = wrapped(seeded(blocks), FSDP)
    ours = ADAM(model.parameters())
    load(model, ours, by_names(reference, optimizer))
    dcp.save(saved(model, ours, SHARDED), checkpoint_id=folder)
    pair = [dist.new_group([first, first + 1]) for first in (0, 2)][dist.get_rank() // 2]
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap, process_group=pair)
        ours = ADAM(model.parameters())
        train(model, ours, range(1))
        state = saved(model, ours, SHARDED)
        dcp.load(state, checkpoint_id=folder, process_group=pair)
        load(model, ours, state, SHARDED)
        check_same_states(saved(model, ours), by_names(reference, optimizer), rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_groups_of_hyper_parameters():
    """Which are not the same as those that the optimizer was made with, and some parameters are in none of them."""
    for wrap in BOTH:
        reference = seeded(blocks)
        theirs = grouped(reference, OPTIMIZERS["momentum"])
        train_reference(reference, theirs, range(2))
        theirs.param_groups[1]["momentum"] = 0.5
        state = by_names(reference, theirs)
        model = wrapped(seeded(blocks, 2), wrap)
        ours = grouped(model, OPTIMIZERS["momentum"])
        load(model, ours, state)
        assert ours.param_groups[1]["momentum"] == 0.5 and ours.param_groups[1]["lr"] == 0.02
        if wrap is FSDP:  # PyTorch's wants states of all parameters that need gradients
            check_same_states(saved(model, ours), state, rtol=0, atol=0)


@on_ranks(2, 3, comm=("shm",))
def test_what_the_first_rank_alone_has():
    """It alone gets the state, and it alone has to give it."""
    reference, optimizer = reference_of(ADAM)
    expected = by_names(reference, optimizer)
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    is_first = dist.get_rank() == 0
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        ours = ADAM(model.parameters())
        with of_type(model, FULL, None, config):
            cls = type(model)
            result = cls.optim_state_dict_to_load(model, ours, expected if is_first else {})
            ours.load_state_dict(result)
            state = cls.optim_state_dict(model, ours)
        assert bool(state) == is_first
        if is_first:
            check_same_states(state, expected, rtol=0, atol=0)
        check_same_states(saved(model, ours), expected, rtol=0, atol=0)
        states = list(ours.state.values())
        assert len({state["step"].data_ptr() for state in states}) == len(states)


@on_ranks(2, comm=("shm",))
def test_states_without_tensors():
    """None, text, numbers, and what belongs to no parameter, come through as they are."""
    results = []
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        train(model, optimizer, range(1))
        state = optimizer.state_dict()
        names = [name for name, param in seeded(blocks).named_parameters() if param.requires_grad]
        for key in state["state"]:
            state["state"][key].update(momentum_buffer=None, text="a", number=2.5, scalar=torch.tensor(3))
        state["state"]["mine"] = {"count": 1}
        with pytest.warns(UserWarning, match="Found a optim state, mine, that FSDP cannot process"):
            whole = saved(model, optimizer, optim_state_dict=state)
        loaded = type(model).optim_state_dict_to_load(model, optimizer, whole)
        empty = {number for number, part in enumerate(model.parameters()) if part.numel() == 0}
        of_elements = {key: value for key, value in loaded["state"].items() if key not in empty}
        results.append((whole["state"].keys(), whole["state"]["0.bias"], of_elements))
        assert set(whole["state"]) == {*names, "mine"}
    assert results[0] == results[1]


@on_ranks(2, comm=("shm",))
def test_states_of_parts_without_elements_come_back():
    model = wrapped(seeded(blocks), FSDP)
    optimizer = ADAM(model.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    assert any(part.numel() == 0 and part in optimizer.state for part in model.parameters())
    for kind in (FULL, SHARDED):
        with of_type(model, kind):
            state = type(model).optim_state_dict(model, optimizer)
            type(model).optim_state_dict_to_load(model, optimizer, state, load_directly=True)
        assert optimizer.state_dict()["state"].keys() == before.keys()
        for number, entries in before.items():
            for name, value in entries.items():
                assert torch.equal(optimizer.state_dict()["state"][number][name], value), (number, name)


@on_ranks(2, comm=("shm",))
def test_parameters_that_were_never_updated():
    for make in (ADAM, OPTIMIZERS["momentum"]):
        model = wrapped(seeded(blocks), FSDP)
        optimizer = make(model.parameters())
        state = saved(model, optimizer)
        assert state["state"] == {} and len(state["param_groups"][0]["params"]) == 9
        load(model, optimizer, state)
        loss_of(model[0], mine(rows(0, 5))).backward()
        optimizer.step()
        assert set(saved(model, optimizer)["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@on_ranks(2, comm=("shm",))
def test_saved_states_are_copies():
    model = wrapped(seeded(blocks), FSDP)
    optimizer = ADAM(model.parameters())
    train(model, optimizer, range(1))
    for kind, config in ((FULL, None), (FULL, FullOptimStateDictConfig(offload_to_cpu=True)), (SHARDED, None)):
        state = saved(model, optimizer, kind, config)
        before = copy.deepcopy(state)
        loaded = quietly(type(model).optim_state_dict_to_load, model, optimizer, state)
        optimizer.load_state_dict(loaded)
        train(model, optimizer, range(1, 2))
        check_same_states(state, before, rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_legacy_functions():
    reference, optimizer = reference_of(ADAM)
    expected = by_names(reference, optimizer)
    for wrap in BOTH:
        model, cls = wrapped(seeded(blocks), wrap), wrap.func
        ours = ADAM(model.parameters())
        with pytest.warns(FutureWarning, match="shard_full_optim_state_dict``.*is being deprecated"):
            parts = cls.shard_full_optim_state_dict(expected, model, optim=ours)
        scattered = quietly(cls.scatter_full_optim_state_dict, expected if dist.get_rank() == 0 else None, model, optim=ours)
        ours.load_state_dict(parts)
        with pytest.warns(FutureWarning, match="sharded_optim_state_dict``.*is being deprecated"):
            in_rows = cls.sharded_optim_state_dict(model, ours)
        flattened = quietly(cls.flatten_sharded_optim_state_dict, in_rows, model, ours)
        for other in (scattered, flattened):
            check_same_states(other, parts, rtol=0, atol=0)
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
            by_input = cls.shard_full_optim_state_dict(expected, model, optim_input=list(model.parameters()))
        check_same_states(by_input, parts, rtol=0, atol=0)
        whole = quietly(cls.full_optim_state_dict, model, ours)
        assert bool(whole) == (dist.get_rank() == 0)
        whole = quietly(cls.full_optim_state_dict, model, ours, rank0_only=False)
        if wrap is FSDP:  # PyTorch's gives one tensor several names, as above
            check_same_states(whole, expected, rtol=0, atol=0)
        numbered = cls.rekey_optim_state_dict(expected, OptimStateKeyType.PARAM_ID, reference)
        check_same_states(numbered, optimizer.state_dict(), rtol=0, atol=0)
        assert by_names(reference, optimizer)["state"].keys() == whole["state"].keys()


@on_ranks(3, comm=("shm",))
def test_another_group_than_the_world():
    """Whose first rank is the one that counts."""
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model = wrapped(seeded(blocks), FSDP, process_group=pair)
    optimizer = ADAM(model.parameters())
    train(model, optimizer, range(1))
    state = saved(model, optimizer, FULL, FullOptimStateDictConfig(rank0_only=True), group=pair)
    assert bool(state) == (dist.get_rank() == 1)
    before = copy.deepcopy(optimizer.state_dict())
    with of_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        type(model).optim_state_dict_to_load(model, optimizer, state, load_directly=True, group=pair)
    check_same_states(optimizer.state_dict(), before, rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_ranks_that_do_not_want_a_state_keep_none_of_it():
    model = wrapped(seeded(blocks), FSDP)
    optimizer = ADAM(model.parameters())
    train(model, optimizer, range(1))
    gathered, most = [], 0

    def full_tensors(*arguments):
        nonlocal most
        wholes = _C.full_tensors(*arguments)
        gathered.extend(weakref.ref(whole) for whole in wholes)
        most = max(most, sum(each() is not None for each in gathered) - len(wholes))
        return wholes

    counting = types.SimpleNamespace(**{**vars(_C), "full_tensors": full_tensors})
    with mock.patch.object(optimizer_states, "_C", counting):
        state = saved(model, optimizer, FULL, FullOptimStateDictConfig(rank0_only=True))
    assert len(gathered) > 3
    assert (most > 0, len(state) > 0) == ((True, True) if dist.get_rank() == 0 else (False, False)), most


@on_ranks(2, comm=("shm",))
def test_mistakes():
    model = wrapped(seeded(blocks), FSDP)
    cls, parameters = type(model), list(model.parameters())
    optimizer = ADAM(parameters)
    train(model, optimizer, range(1))
    state = saved(model, optimizer)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        cls.optim_state_dict_to_load(model, optimizer, {"param_groups": []})
    wrong = copy.deepcopy(state)
    wrong["state"]["0.weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="does not have same shape as its parameter: 'exp_avg' of '0.weight'"):
        cls.optim_state_dict_to_load(model, optimizer, wrong)
    wrong = copy.deepcopy(state)
    wrong["param_groups"][0]["params"].append("3.weight")
    with pytest.raises(KeyError, match="3.weight"):
        cls.optim_state_dict_to_load(model, optimizer, wrong)
    with pytest.raises(ValueError, match="expected an optimizer of the model's parameters"):
        cls.optim_state_dict(model, ADAM([*parameters, nn.Parameter(torch.ones(1))]))
    with pytest.raises(TypeError, match="Optimizer input should be an iterable"):
        quietly(cls.full_optim_state_dict, model, optimizer, 3)
    with pytest.raises(ValueError, match="Optimizer input should not be empty"):
        quietly(cls.full_optim_state_dict, model, optimizer, [])


@on_ranks(3, comm=("shm",))
def test_ranks_of_whom_one_has_no_state():
    model = wrapped(seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6))), FSDP)
    optimizer = ADAM(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    lost = next(param for param in model[1].parameters() if param.numel() > 0)
    state = optimizer.state.pop(lost) if dist.get_rank() == 1 else optimizer.state[lost]
    with pytest.raises(RuntimeError, match=r"at least the optimizer states needed.*but ranks \[1\]"):
        saved(model, optimizer)
    optimizer.state[lost] = {**state, "step": torch.tensor(float(dist.get_rank()))}
    with pytest.raises(RuntimeError, match="Ranks have different values of the optimizer state 'step'"):
        saved(model, optimizer)
