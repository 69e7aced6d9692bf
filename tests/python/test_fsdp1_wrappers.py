"""Which wrappers ``FullyShardedDataParallel`` makes, over which ranks, and what it says of arguments that do not fit."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)

from fsdp1_flat_subjects import BOTH, FSDP
from fsdp1_subjects import cleaned, loss_of, quietly, summoned
from harness import on_ranks
from subjects import mine, rows, seeded


def blocks():
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, 3))


def half_frozen():
    model = seeded(blocks)
    model[0].bias.requires_grad_(False)
    return model


def names_of(model):
    return [cleaned(name) for name, _ in model.named_parameters()]


def said_by(function, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments, **options)
    return [str(each.message) for each in caught]


@on_ranks(1, 2, comm=("gloo",))
def test_a_group_of_one_rank_is_not_sharded():
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for make in BOTH:
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, None):
            with pytest.warns(UserWarning, match="switching to use `NO_SHARD` instead of .* since the world size is 1"):
                model = make(nn.Linear(5, 7), process_group=own, sharding_strategy=strategy)
            assert model.sharding_strategy is ShardingStrategy.NO_SHARD
        said = said_by(make, nn.Linear(5, 7), process_group=own, sharding_strategy=ShardingStrategy.NO_SHARD)
        assert not any("switching to use" in each for each in said)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3)
def test_hybrid_shards_of_one_rank_are_reduced_over_the_replicas(use_orig_params):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    options = dict(sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=use_orig_params, device_mesh=mesh)
    model = quietly(FSDP, nn.Linear(1, 1, bias=False), **options)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    (parameter,) = model.parameters()
    torch.testing.assert_close(parameter.grad.sum(), torch.tensor((ranks + 1) / 2))


@on_ranks(2, comm=("gloo",))
def test_roots():
    for make in BOTH:
        layers = nn.Sequential(make(nn.Linear(5, 5)), nn.ReLU(), make(nn.Sequential(make(nn.Linear(5, 5)), nn.ReLU())))
        assert make is not FSDP or layers[2][0].check_is_root() is False  # asked before the first forward
        wrappers = type(layers[0]).fsdp_modules(layers)
        assert wrappers == [layers[0], layers[2], layers[2][0]]
        assert type(layers[0]).fsdp_modules(layers, root_only=True) == [layers[0], layers[2]]
        layers(torch.ones(2, 5)).sum().backward()
        assert [each.check_is_root() for each in wrappers] == [True, True, False]
        assert all(parameter.grad is not None for parameter in layers.parameters())
    inner = FSDP(nn.Linear(5, 5))
    assert inner.check_is_root()
    outer = FSDP(nn.Sequential(inner, nn.Linear(5, 5)))
    assert outer.check_is_root() and not inner.check_is_root()
    with outer.no_sync():
        outer(torch.ones(2, 5)).sum().backward()


@on_ranks(2, comm=("gloo",))
def test_what_all_wrappers_share_is_looked_at_in_the_first_forward():
    for name in ("use_orig_params", "limit_all_gathers"):
        for make in BOTH:
            model = seeded(blocks)
            model[1] = make(model[1], **{name: True})
            model = make(model, **{name: False})
            for _ in range(2 if make is FSDP else 1):  # PyTorch's says so once
                with pytest.raises(ValueError, match=f"Expects one homogeneous value for _?{name}"):
                    loss_of(model, rows(0, 5))


@on_ranks(2, comm=("gloo",))
def test_frozen_parameters_beside_others():
    policy = ModuleWrapPolicy({nn.Linear})
    for make in BOTH:
        model = half_frozen()
        with pytest.raises(ValueError, match="has both parameters with requires_grad=True and False"):
            make(model, auto_wrap_policy=policy)
        with pytest.warns(UserWarning, match="do not recommend wrapping such modules"):
            model = make(half_frozen(), auto_wrap_policy=policy, use_orig_params=True)
        loss_of(model, mine(rows(0, 5))).backward()
        named = {cleaned(name): parameter for name, parameter in model.named_parameters()}
        assert named["0.bias"].grad is None and not named["0.bias"].requires_grad
        for options in (dict(), dict(auto_wrap_policy=policy)):
            model = half_frozen()
            model = make(model, ignored_states=[model[0].bias], **options)
            loss_of(model, mine(rows(0, 5))).backward()
            assert "0.bias" in names_of(model)


@on_ranks(2, comm=("gloo",))
def test_what_is_ignored():
    for make in BOTH:
        model = seeded(blocks)
        with pytest.raises(ValueError, match="Cannot pass both ignored_modules and ignored_states"):
            make(model, ignored_modules=[model[0]], ignored_states=[model[0].weight])
        for states in ([model[0].weight, model[1]], [model[0].weight.data], [3]):
            with pytest.raises(ValueError, match="ignored_states expects all nn.Parameter or all nn.Module list"):
                make(model, ignored_states=states)
        with pytest.raises(ValueError, match="ignored_modules expects nn.Module list elements but got types"):
            make(model, ignored_modules=[model[0].weight])
        with pytest.raises(TypeError, match="should be an iterable of `torch.nn.Module`s" if make is FSDP else ""):
            make(model, ignored_modules=3)
        with pytest.warns(UserWarning, match="Trying to ignore the top-level module passed into"):
            make(model, ignored_modules=[model])
        model = seeded(blocks)
        model[1] = make(model[1])
        with pytest.raises(ValueError, match="`ignored_modules` should not include FSDP modules"):
            make(model, ignored_modules=[model[1]])


@on_ranks(2, comm=("gloo",))
def test_what_is_ignored_need_not_be_there_or_the_same_on_all_ranks():
    for make in BOTH:
        strangers = [nn.Linear(5, 7)] * (1 + dist.get_rank())
        model = seeded(blocks)
        ignored = strangers + [model[1][1]] * dist.get_rank() + [model[2]]
        model = make(model, ignored_modules=ignored)
        assert names_of(model) == ["_flat_param", "2.weight", "2.bias"]
        loss_of(model, mine(rows(0, 5))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        for states_of in (lambda module: [module], lambda module: list(module.parameters())):
            model = seeded(blocks)
            model = make(model, ignored_states=states_of(model[2]), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            assert names_of(model) == ["0._flat_param", "1.0._flat_param", "2.weight", "2.bias"]


@on_ranks(2, comm=("gloo",))
def test_groups_that_do_not_fit():
    mesh = init_device_mesh("cpu", (2,))
    for make in BOTH:
        for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
            with pytest.raises(ValueError, match="requires explicit specification of process group or device_mesh"):
                make(nn.Linear(5, 7), sharding_strategy=strategy)
            with pytest.raises(ValueError, match="Expected process_group to be passed in"):
                make(nn.Linear(5, 7), dist.group.WORLD, sharding_strategy=strategy)
        with pytest.raises(ValueError, match="Expected device_mesh to have ndim=2"):
            make(nn.Linear(5, 7), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh"):
            make(nn.Linear(5, 7), dist.group.WORLD, device_mesh=mesh)


@on_ranks(2, comm=("gloo",))
def test_policies():
    def model_of_many():
        attention = nn.MultiheadAttention(8, 2)
        return nn.ModuleDict({"list": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 80)]), "attention": attention})

    def by_name(module):
        return dict(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP) if isinstance(module, nn.Linear) else False

    policies = [
        always_wrap_policy,
        functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        functools.partial(size_based_auto_wrap_policy, min_num_params=500),
        ModuleWrapPolicy({nn.Linear}),
        CustomPolicy(by_name),
    ]
    for policy in policies:
        outcomes = []
        for make in BOTH:
            model = quietly(make, nn.Sequential(seeded(model_of_many), nn.Linear(8, 8)), auto_wrap_policy=policy)
            wrappers = type(model).fsdp_modules(model)
            outcomes.append([(str(type(each.module)), each.sharding_strategy) for each in wrappers] + names_of(model))
        assert outcomes[0] == outcomes[1], policy


@on_ranks(2, comm=("gloo",))
def test_policies_are_for_what_is_not_wrapped_yet():
    for make in BOTH:
        model = seeded(blocks)
        model[0] = make(model[0])
        with pytest.raises(ValueError, match="requires modules to not already have FSDP applied but found 0 in"):
            make(model, auto_wrap_policy=always_wrap_policy)
        with pytest.warns(UserWarning, match="containers that do not implement forward"):
            make(nn.ModuleList([nn.Linear(5, 5)]))


@on_ranks(2, comm=("gloo",))
def test_wrapping_where_it_is_enabled():
    assert type(wrap(nn.Linear(5, 5))) is nn.Linear
    low = MixedPrecision(torch.bfloat16)
    with enable_wrap(wrapper_cls=FSDP, mixed_precision=low, use_orig_params=True):
        layer, other = wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 5), mixed_precision=MixedPrecision(), use_orig_params=False)
    assert isinstance(layer, FSDP) and layer.mixed_precision == low and names_of(layer) == ["weight", "bias"]
    assert other.mixed_precision == MixedPrecision() and names_of(other) == ["_flat_param"]
    assert type(wrap(nn.Linear(5, 5))) is nn.Linear


class Made(nn.Linear):
    """Has a buffer too, and says how it is initialized."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("offset", torch.ones(3, device=self.weight.device))

    def reset_parameters(self):
        for tensor in (*self.parameters(), *self.buffers()):
            nn.init.constant_(tensor, 2)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, comm=("gloo",))
def test_modules_on_the_meta_device(use_orig_params):
    def materialize(module):
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 3)

    for make in BOTH:
        for function, value in ((None, 2), (materialize, 3)):
            for policy in (None, ModuleWrapPolicy({Made})):
                with torch.device("meta"):
                    model = nn.Sequential(Made(), nn.Sequential(Made()))
                model = make(
                    model, param_init_fn=function, auto_wrap_policy=policy, use_orig_params=use_orig_params
                )
                with summoned(model):
                    for tensor in (*model.parameters(), *model.buffers()):
                        assert torch.equal(tensor, torch.full_like(tensor, value))
        with torch.device("meta"):
            model = Made()
        with pytest.raises(ValueError, match="to be callable"):
            make(model, param_init_fn=3)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3, comm=("gloo",))
def test_the_first_ranks_parameters_and_buffers(use_orig_params):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(dist.get_rank() + 1)
    model = FSDP(model, sync_module_states=True, use_orig_params=use_orig_params)
    assert torch.equal(model[1].running_mean, torch.ones(5))
    torch.manual_seed(0)
    expected = nn.Linear(5, 5)
    with summoned(model):
        assert torch.equal(model[0].weight, expected.weight) and torch.equal(model[0].bias, expected.bias)


class Kinds(nn.Module):
    """Takes and gives tensors in other things."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, given, *, more):
        return {"sum": [self.inner(given["x"][0]) + more[0]], "twice": (self.inner(self.inner(more[0])), 3)}


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", BOTH)
def test_the_first_ranks_buffers_of_ignored_modules(use_orig_params):
    """Their parameters stay as they are, as with PyTorch's class; ranks may ignore other modules."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    for each in (*model[1:].buffers(), *model[1:].parameters()):
        each.detach().fill_(rank)
    ignored = [model[1], model[2]] if use_orig_params else [model[1 + rank]]
    model = FSDP(model, use_orig_params=use_orig_params, sync_module_states=True, ignored_modules=ignored)
    assert all(torch.equal(each, torch.zeros_like(each)) for each in model.buffers())
    assert torch.equal(ignored[0].weight, torch.full((4,), float(rank)))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", BOTH)
def test_buffers_of_wrappers_among_other_ranks_stay_theirs(use_orig_params):
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    expert = nn.Linear(4, 4)
    expert.register_buffer("ids", torch.tensor([rank]))
    expert = FSDP(expert, process_group=alone, use_orig_params=use_orig_params, sync_module_states=True)
    model = nn.Sequential(nn.Linear(4, 4), expert)
    model.register_buffer("count", torch.tensor([rank]))
    model = FSDP(model, use_orig_params=use_orig_params, sync_module_states=True)
    assert model.module[1].module.ids.item() == rank
    assert model.module.count.item() == 0


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", BOTH)
def test_what_is_registered_in_wrappers_later_is_refused(use_orig_params):
    """It would be trained by each rank for itself."""
    inner = FSDP(nn.Sequential(nn.Linear(4, 4)), use_orig_params=use_orig_params)
    inner.module.lora = nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="'lora.weight' was registered in a Sequential after"):
        FSDP(nn.Sequential(inner, nn.Linear(4, 4)), use_orig_params=use_orig_params)
    inner.module[0].weight = nn.Parameter(torch.ones(4, 4))  # in the place of one, which is taken over later
    left_alone = list(inner.module.lora.parameters())
    FSDP(nn.Sequential(inner, nn.Linear(4, 4)), use_orig_params=use_orig_params, ignored_states=left_alone)


@on_ranks(2, comm=("gloo",))
def test_inputs_in_containers_and_layers_that_run_twice():
    outcomes = []
    for make in (lambda module: module, *BOTH):
        model = seeded(Kinds)
        model.inner = make(model.inner)
        model = make(model)
        given = model({"x": [torch.ones(2, 5)]}, more=(torch.full((2, 5), 2.0),))
        assert given["twice"][1] == 3
        loss = given["sum"][0].sum() + given["twice"][0].sum()
        loss.backward()
        outcomes.append(loss.detach())
    torch.testing.assert_close(outcomes[0], outcomes[1])
    torch.testing.assert_close(outcomes[0], outcomes[2])
