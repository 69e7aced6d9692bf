"""State dicts of ``FullyShardedDataParallel``: the same as PyTorch's, tensor by tensor, whole and in rows."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp1_subjects import BOTH, FSDP, TORCH, blocks, check_same, loss_of, quietly, wrapped
from harness import on_ranks
from subjects import mine, rows, seeded

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def of_type(model, *settings):
    return quietly(type(model).state_dict_type, model, *settings)


def state_of(model, *settings):
    with of_type(model, *settings):
        return quietly(model.state_dict)


def load(model, state, kind):
    with of_type(model, kind):
        return quietly(model.load_state_dict, state)


def seeded_with(wrap, make=blocks, seed=1, **options):
    return wrapped(seeded(make, seed), wrap, **options)


def check_same_values(ours, theirs):
    """Of two state dicts, rows as rows of the same ranks."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        other = theirs[name]
        assert type(value) is type(other), name
        if isinstance(value, ShardedTensor):
            ours_of, theirs_of = value.metadata(), other.metadata()
            assert (ours_of.size, ours_of.shards_metadata) == (theirs_of.size, theirs_of.shards_metadata), name
            value, other = ([each.tensor for each in rows.local_shards()] for rows in (value, other))
            assert len(value) == len(other), name
        elif isinstance(value, DTensor):
            assert (value.placements, value.device_mesh, value.shape) == (other.placements, other.device_mesh, other.shape)
            value, other = value.to_local(), other.to_local()
        torch.testing.assert_close(value, other, rtol=0, atol=0, msg=lambda said: f"{name}: {said}")


class Counting(nn.Module):
    """Has buffers, one of which is in no state dict, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Linear(5, 3)
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.inner(self.norm(x))

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


@on_ranks(1, 2, 3, 4, comm=("shm",))
def test_rows_are_pytorchs():
    """Parameters of fewer rows than there are ranks leave ranks without a shard."""
    for config in (None, ShardedStateDictConfig(offload_to_cpu=True)):
        for make in (blocks, lambda: nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2), nn.Linear(2, 3))):
            states = [state_of(seeded_with(wrap, make), SHARDED, config) for wrap in BOTH]
            check_same_values(*states)
    if dist.get_world_size() > 1:
        assert all(isinstance(value, ShardedTensor) for value in states[0].values())


@on_ranks(2, comm=("shm", "gloo"))
def test_buffers_and_extra_states():
    for kind in (FULL, SHARDED):
        policy = MixedPrecision(buffer_dtype=torch.float64)
        states = [state_of(wrap(seeded(Counting), mixed_precision=policy), kind) for wrap in BOTH]
        check_same_values(*({name: value for name, value in state.items() if "extra" not in name} for state in states))
        assert states[0]["_extra_state"] == states[1]["_extra_state"] == {"version": 1}


@on_ranks(2, 4, comm=("shm",))
def test_rows_with_a_mesh_are_dtensors():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = [seeded_with(wrap, device_mesh=mesh) for wrap in BOTH]
    states = [state_of(model, SHARDED) for model in models]
    check_same_values(*states)
    assert all(isinstance(value, DTensor) and value.placements == (Shard(0),) for value in states[0].values())
    for model in models:
        quietly(type(model).set_state_dict_type, model, SHARDED)
        model.state_dict()
        settings = type(model).get_state_dict_type(model)
        assert settings.state_dict_config._use_dtensor and settings.optim_state_dict_config._use_dtensor
        with of_type(model, LOCAL):
            with pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"):
                model.state_dict()
            with pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"):
                type(model).get_state_dict_type(model)


@on_ranks(4, comm=("shm", "gloo"))
def test_rows_of_hybrid_wrappers():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group(1), mesh.get_group(0))
    for where in (dict(device_mesh=mesh), dict(process_group=groups)):
        models = [seeded_with(wrap, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **where) for wrap in BOTH]
        states = [state_of(model, SHARDED) for model in models]
        check_same_values(*states)
        if "device_mesh" in where:
            assert all(value.placements == (Replicate(), Shard(0)) for value in states[0].values())
        other = seeded_with(FSDP, seed=2, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **where)
        load(other, states[1], SHARDED)
        check_same(other, seeded(blocks), exact=True)


@pytest.mark.parametrize("with_mesh", [False, True])
@on_ranks(2, 3)
def test_rows_are_loaded(with_mesh):
    """Ours and PyTorch's into ours and PyTorch's."""
    where = dict(device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))) if with_mesh else {}
    for saved in BOTH:
        state = state_of(seeded_with(saved, **where), SHARDED)
        for wrap in BOTH:
            model = seeded_with(wrap, seed=2, **where)
            assert str(load(model, dict(state), SHARDED)) == "<All keys matched successfully>"
            check_same(model, seeded(blocks), exact=True)


@on_ranks(1, 2, 3)
def test_training_goes_on_from_what_was_saved():
    """Between a backward and its step, and before one; what was saved does not change by training."""
    for kind in (FULL, SHARDED):
        model, other = seeded_with(FSDP), seeded_with(FSDP, seed=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, mine(rows(0, 5))).backward()
        early = state_of(model, kind)
        optimizer.step()
        late = state_of(model, kind)
        losses = [loss_of(model, mine(rows(1, 5))).detach()]
        load(other, late, kind)
        losses.append(loss_of(other, mine(rows(1, 5))).detach())
        load(other, early, kind)
        check_same(other, seeded(blocks), exact=True)
        assert torch.equal(*losses)


@on_ranks(2, comm=("shm",))
def test_inside_summon_full_params():
    model = seeded_with(FSDP)
    expected = state_of(model, SHARDED)
    with type(model).summon_full_params(model):
        check_same_values(state_of(model, SHARDED), expected)
        wholes = state_of(model, FULL)
    check_same_values(wholes, state_of(model, FULL))


@on_ranks(2)
def test_inside_summon_full_params_for_one_rank():
    """Nobody waits for a rank that gathers nothing; those to which nothing is shown have their parts."""
    model = seeded_with(FSDP, use_orig_params=True)
    expected = state_of(model, FULL)
    with type(model).summon_full_params(model, writeback=False, rank0_only=True):
        state = state_of(model, FULL)
        if dist.get_rank() == 0:
            check_same_values(state, expected)
        else:
            with pytest.raises(ValueError, match="SHARDED_STATE_DICT has rows of whole parameters"):
                state_of(model, SHARDED)
    check_same_values(state_of(model, FULL), expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("shm",))
def test_inside_summon_full_params_they_have_what_was_assigned(use_orig_params):
    model = FSDP(seeded(lambda: nn.Linear(5, 3)), use_orig_params=use_orig_params)
    with type(model).summon_full_params(model):
        model.module.weight = nn.Parameter(torch.ones(3, 5))
        assert (state_of(model, FULL)["weight"] == 1).all()
    assert (state_of(model, FULL)["weight"] == 1).all()


@pytest.mark.parametrize("with_mesh", [False, True])
@on_ranks(2, 3, comm=("shm",))
def test_distributed_checkpoints(with_mesh, folder=None):
    """From one number of ranks to another: a group of fewer ranks, and the unwrapped model."""
    where = dict(device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))) if with_mesh else {}
    dcp.save({"model": state_of(seeded_with(FSDP, **where), SHARDED)}, checkpoint_id=folder)
    for wrap, options in ((FSDP, where), (TORCH, where), (FSDP, {})):
        model = seeded_with(wrap, seed=2, **options)
        state = {"model": state_of(model, SHARDED)}
        dcp.load(state, checkpoint_id=folder)
        load(model, state["model"], SHARDED)
        check_same(model, seeded(blocks), exact=True)
    plain = seeded(blocks, 2)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    for name, value in seeded(blocks).state_dict().items():
        assert torch.equal(state["model"][name], value)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = seeded_with(FSDP, seed=2, process_group=alone)
    state = {"model": state_of(model, SHARDED)}
    dcp.load(state, checkpoint_id=folder, process_group=alone)
    load(model, state["model"], SHARDED)
    check_same(model, seeded(blocks), exact=True)


@on_ranks(2, comm=("shm",))
def test_wholes_of_the_first_rank_alone():
    for wrap, offload in ((FSDP, False), (FSDP, True), (TORCH, False)):
        config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        state = state_of(seeded_with(wrap), FULL, config)
        check_same_values(state, seeded(blocks).state_dict() if dist.get_rank() == 0 else {})


@on_ranks(1, 2, comm=("shm",))
def test_no_shard_gives_wholes_and_a_warning():
    for wrap in BOTH:
        model = seeded_with(wrap, sharding_strategy=ShardingStrategy.NO_SHARD)
        for kind in (FULL, SHARDED, LOCAL):
            with of_type(model, kind):
                with pytest.warns(UserWarning, match="full_state_dict will be returned"):
                    state = model.state_dict()
                check_same_values(state, seeded(blocks).state_dict())
                with pytest.warns(UserWarning, match="full_state_dict will ?be returned"):
                    model.load_state_dict({name: value + 1 for name, value in state.items()})
            assert torch.equal(state_of(model, FULL)["2.bias"], state["2.bias"] + 1)
            load(model, state, FULL)


@on_ranks(2, comm=("shm",))
def test_local_state_dicts_are_for_flat_parameters():
    model = seeded_with(FSDP)
    with of_type(model, LOCAL):
        with pytest.raises(RuntimeError, match="can only be used when parameters are flatten and sharded"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="can only be used when parameters are flatten and sharded"):
            model.load_state_dict({})


@on_ranks(2, comm=("shm",))
def test_types_nest_and_are_restored():
    for wrap in BOTH:
        model = seeded_with(wrap)
        kind = lambda: type(model).get_state_dict_type(model).state_dict_type  # noqa: E731
        assert kind() is FULL
        with of_type(model, SHARDED):
            with of_type(model, FULL, FullStateDictConfig(rank0_only=True)):
                assert type(model).get_state_dict_type(model[1]).state_dict_config.rank0_only
            assert kind() is SHARDED
        assert kind() is FULL
        former = quietly(type(model).set_state_dict_type, model, SHARDED)
        assert former.state_dict_type is FULL and type(former.optim_state_dict_config) is FullOptimStateDictConfig
        former = quietly(type(model).set_state_dict_type, model, FULL)
        assert type(former.state_dict_config) is ShardedStateDictConfig
        assert type(former.optim_state_dict_config) is ShardedOptimStateDictConfig


@on_ranks(2, comm=("shm",))
def test_wrong_configurations():
    for wrap in BOTH:
        model = seeded_with(wrap)
        full, sharded = FullStateDictConfig(), ShardedStateDictConfig()
        for kind, config in ((FULL, sharded), (SHARDED, full), (LOCAL, full)):
            with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
                quietly(type(model).set_state_dict_type, model, kind, config)
        with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"):
            quietly(type(model).set_state_dict_type, model, FULL, None, ShardedOptimStateDictConfig())
        assert type(model).get_state_dict_type(model).state_dict_type is FULL
        quietly(type(model).set_state_dict_type, model[1], SHARDED)
        with pytest.raises(AssertionError, match="must have the same state dict settings"):
            type(model).get_state_dict_type(model)


@on_ranks(2, comm=("shm",))
def test_missing_and_unexpected_keys_are_clean():
    for kind in (FULL, SHARDED):
        outcomes = []
        for wrap in BOTH:
            model = seeded_with(wrap)
            state = state_of(model, kind)
            state["1.other"] = state.pop("1.0.weight")
            with of_type(model, kind):
                outcomes.append(quietly(model.load_state_dict, state, strict=False))
        assert outcomes[0].missing_keys == outcomes[1].missing_keys == ["1.0.weight"]
        assert outcomes[0].unexpected_keys == outcomes[1].unexpected_keys == ["1.other"]


@on_ranks(2, comm=("shm",))
def test_pytorchs_functions_on_state_dicts_say_what_to_use():
    model = nn.Sequential(wrapped(seeded(blocks), FSDP))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: dcp_state_dict.get_model_state_dict(model),
        lambda: dcp_state_dict.get_optimizer_state_dict(model, optimizer),
        lambda: dcp_state_dict.get_state_dict(model, optimizer),
        lambda: dcp_state_dict.set_model_state_dict(model, seeded(blocks).state_dict()),
        lambda: dcp_state_dict.set_optimizer_state_dict(model, optimizer, optimizer.state_dict()),
        lambda: dcp_state_dict.set_state_dict(
            model, optimizer, model_state_dict=seeded(blocks).state_dict(), optim_state_dict=optimizer.state_dict()
        ),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="FSDP.optim_state_dict"):
            call()
