"""State dicts where a wrapper shows one flat parameter, of models and of optimizers: by the names of the unwrapped model."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, LocalStateDictConfig, ShardingStrategy, StateDictType

from fsdp1_flat_subjects import blocks
from fsdp1_subjects import FSDP, TORCH, quietly, wrapped
from harness import on_ranks
from subjects import seeded
from test_fsdp1_optimizer_states import (
    ADAM,
    OPTIMIZERS,
    by_names,
    check_same_states,
    load,
    of_type,
    saved,
    train,
    train_reference,
)
from test_fsdp1_state_dicts import Counting, check_same_values, state_of
from test_fsdp1_state_dicts import load as load_values

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
FLAT = functools.partial(FSDP, use_orig_params=False)
TORCH_FLAT = functools.partial(TORCH, use_orig_params=False)
BOTH = (FLAT, TORCH_FLAT)


def one_unit(wrap, seed=2):
    return quietly(wrap, seeded(blocks, seed))


def units(wrap, seed=2, **options):
    return wrapped(seeded(blocks, seed), wrap, **options)


def reference_of(make, steps=2):
    model = seeded(blocks)
    optimizer = make(model.parameters())
    train_reference(model, optimizer, range(steps))
    return model, optimizer


def check_values(model, expected):
    check_same_values(state_of(model, FULL), expected)


@on_ranks(1, 2, 3, comm=("shm",))
def test_rows_are_pytorchs():
    for make in (blocks, lambda: nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2), nn.Linear(2, 3))):
        check_same_values(*(state_of(wrapped(seeded(make), wrap), SHARDED) for wrap in BOTH))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        check_same_values(*(state_of(units(wrap, device_mesh=mesh), SHARDED) for wrap in BOTH))


@on_ranks(2, comm=("shm",))
def test_buffers_and_extra_states():
    for kind in (FULL, SHARDED):
        states = [state_of(wrap(seeded(Counting)), kind) for wrap in BOTH]
        assert [state.pop("_extra_state") for state in states] == 2 * [{"version": 1}]
        check_same_values(*states)


@on_ranks(2, 3, comm=("shm",))
def test_rows_are_loaded():
    """Of any class and form into any."""
    expected = seeded(blocks).state_dict()
    for saved_by in (FLAT, TORCH_FLAT, FSDP):
        state = state_of(units(saved_by, 1), SHARDED)
        for wrap in (FLAT, TORCH_FLAT, FSDP):
            model = units(wrap)
            assert str(load_values(model, dict(state), SHARDED)) == "<All keys matched successfully>"
            check_values(model, expected)


@on_ranks(1, 2, 4, comm=("shm",))
def test_local_states_are_pytorchs():
    """On four ranks some have nothing but padding."""
    small = lambda: nn.Sequential(nn.Linear(5, 1), nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear(2, 3))  # noqa: E731
    for make in (blocks, small):
        for config in (None, LocalStateDictConfig(offload_to_cpu=True)):
            states = [state_of(wrapped(seeded(make), wrap), LOCAL, config) for wrap in BOTH]
            check_same_values(*states)
        if dist.get_world_size() > 1:
            assert sorted(states[0]) == ["1._flat_param", "_flat_param"]
        for state in states:
            for wrap in BOTH:
                model = wrapped(seeded(make, 2), wrap)
                load_values(model, dict(state), LOCAL)
                check_values(model, seeded(make).state_dict())


@on_ranks(2, comm=("shm",))
def test_local_states_that_do_not_fit():
    model = units(FLAT)
    state = state_of(model, LOCAL)
    with of_type(model, LOCAL):
        with pytest.raises(AssertionError, match="No `FlatParameter` in `state_dict`"):
            model.load_state_dict({"1._flat_param": state["1._flat_param"]})
        with pytest.raises(AssertionError, match="should be ShardedTensor"):
            model.load_state_dict({name: torch.ones(3) for name in state})
        with pytest.raises(ValueError, match="into the same wrapping on as many ranks"):
            model.load_state_dict({"_flat_param": state["1._flat_param"], "1._flat_param": state["_flat_param"]})
    check_values(model, seeded(blocks, 2).state_dict())


WRAPPINGS = {
    "flat units": lambda: units(FLAT),
    "one flat unit": lambda: one_unit(FLAT),
    "units": lambda: units(FSDP),
    "kept whole": lambda: units(FLAT, sharding_strategy=ShardingStrategy.NO_SHARD),
    "mesh": lambda: units(FLAT, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    "pytorch's": lambda: units(TORCH_FLAT),
}


@pytest.mark.meet(1)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2, 3, comm=("shm",))
def test_optimizers_from_any_wrapping_into_any(kind):
    """As for parameters that are shown under their own names; each goes on as the unwrapped model does."""
    reference, optimizer = reference_of(ADAM)
    values, state = copy.deepcopy(reference.state_dict()), by_names(reference, optimizer)
    expected = train_reference(reference, optimizer, range(2, 4))
    for source, target in [(each, "flat units") for each in WRAPPINGS] + [("flat units", each) for each in WRAPPINGS]:
        given = state
        for name in (source, target):
            model = WRAPPINGS[name]()
            quietly(model.load_state_dict, values)
            ours = ADAM(model.parameters())
            load(model, ours, given, kind)
            given = saved(model, ours, kind)
        if kind is FULL:
            check_same_states(given, state, rtol=0, atol=0)
        exact = target != "pytorch's" or dist.get_world_size() == 2
        losses, said = train(model, ours, range(2, 4)), f"from {source} into {target}: "
        torch.testing.assert_close(
            losses, expected, msg=lambda text: said + text, **(dict(rtol=0, atol=0) if exact else {})
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 3, comm=("shm",))
def test_states_are_the_unwrapped_models(name):
    reference, optimizer = reference_of(OPTIMIZERS[name])
    model = units(FLAT, 1)
    ours = OPTIMIZERS[name](model.parameters())
    train(model, ours, range(2))
    state = saved(model, ours)
    check_same_states(state, by_names(reference, optimizer), rtol=0, atol=0)
    load(model, ours, state)
    assert train(model, ours, range(2, 4)) == train_reference(reference, optimizer, range(2, 4))


@on_ranks(2, 4, comm=("shm",))
def test_checkpoints_of_another_number_of_ranks(folder=None):
    reference, optimizer = reference_of(ADAM)
    model = units(FLAT)
    ours = ADAM(model.parameters())
    quietly(model.load_state_dict, reference.state_dict())
    load(model, ours, by_names(reference, optimizer))
    dcp.save({"model": state_of(model, SHARDED), "optimizer": saved(model, ours, SHARDED)}, checkpoint_id=folder)
    half = dist.get_world_size() // 2
    group = [dist.new_group(list(range(first, first + half))) for first in (0, half)][dist.get_rank() // half]
    model = units(FLAT, process_group=group)
    ours = ADAM(model.parameters())
    train(model, ours, range(1))
    state = {"model": state_of(model, SHARDED), "optimizer": saved(model, ours, SHARDED)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    load_values(model, state["model"], SHARDED)
    load(model, ours, state["optimizer"], SHARDED)
    check_values(model, reference.state_dict())
    check_same_states(saved(model, ours), by_names(reference, optimizer), rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_what_the_first_rank_alone_has():
    reference, optimizer = reference_of(ADAM)
    expected = by_names(reference, optimizer)
    is_first = dist.get_rank() == 0
    for wrap in BOTH:
        model = units(wrap)
        ours = ADAM(model.parameters())
        with of_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
            type(model).optim_state_dict_to_load(model, ours, expected if is_first else {}, load_directly=True)
            state = type(model).optim_state_dict(model, ours)
        assert bool(state) == is_first
        check_same_states(saved(model, ours), expected, rtol=0, atol=0)


@on_ranks(2, comm=("shm",))
def test_states_that_are_no_flat_parameters():
    """What is updated as one has one step; a tensor that is missing counts as zero."""
    reference, optimizer = reference_of(ADAM)
    state = by_names(reference, optimizer)

    def changed(name, **values):
        other = copy.deepcopy(state)
        other["state"][name].update(values)
        return other

    for wrap in BOTH:
        model = units(wrap)
        ours = ADAM(model.parameters())
        lacking = copy.deepcopy(state)
        del lacking["state"]["1.2.weight"]
        for wrong in (changed("0.bias", step=torch.tensor(5.0)), lacking):
            with pytest.raises(ValueError, match="must have scalar state with the same value and dtype"):
                type(model).optim_state_dict_to_load(model, ours, wrong)
        with pytest.raises(ValueError, match="Differing optimizer state names"):
            type(model).optim_state_dict_to_load(model, ours, changed("0.bias", more=torch.zeros(7)))
        with pytest.raises(ValueError, match="Differing optimizer state types"):
            type(model).optim_state_dict_to_load(model, ours, changed("0.bias", exp_avg=1.0))
        with pytest.raises(ValueError, match="positive-dimension tensor state with the same dtype"):
            type(model).optim_state_dict_to_load(model, ours, changed("0.bias", exp_avg=torch.zeros(7).double()))
        with pytest.raises(ValueError, match="does not have same shape as its parameter"):
            type(model).optim_state_dict_to_load(model, ours, changed("0.bias", exp_avg=torch.zeros(3)))
    model = units(FLAT)
    sgd, state = OPTIMIZERS["momentum"](model.parameters()), by_names(*reference_of(OPTIMIZERS["momentum"]))
    del state["state"]["0.weight"]
    load(model, sgd, state)
    loaded = saved(model, sgd)["state"]
    assert not loaded["0.weight"]["momentum_buffer"].any()
    assert torch.equal(loaded["0.bias"]["momentum_buffer"], state["state"]["0.bias"]["momentum_buffer"])


@on_ranks(2, comm=("shm",))
def test_ranks_of_whom_one_has_no_state():
    for wrap in BOTH:
        model = units(wrap)
        optimizer = ADAM(model.parameters())
        train(model, optimizer, range(1))
        if dist.get_rank() == 1:
            del optimizer.state[next(model.parameters())]
        with pytest.raises(RuntimeError, match="at least the optimizer states needed by rank 0's optimizer"):
            saved(model, optimizer)


@on_ranks(2, comm=("shm",))
def test_states_without_tensors():
    results = []
    for wrap in BOTH:
        model = units(wrap)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        train(model, optimizer, range(1))
        state = optimizer.state_dict()
        for key in state["state"]:
            state["state"][key].update(momentum_buffer=None, text="a", number=2.5, scalar=torch.tensor(3))
        whole = saved(model, optimizer, optim_state_dict=state)
        loaded = type(model).optim_state_dict_to_load(model, optimizer, whole)
        results.append((whole["state"]["0.bias"], loaded["state"], loaded["param_groups"]))
    assert results[0] == results[1]
