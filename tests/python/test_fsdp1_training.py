"""``FullyShardedDataParallel``: trains as the unsharded model and as PyTorch's class do."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from fsdp1_subjects import (
    BOTH,
    FSDP,
    blocks,
    check_same,
    check_same_gradient,
    check_training,
    loss_of,
    quietly,
    summoned,
    wholes_of,
    wrapped,
)
from harness import on_ranks
from subjects import mine, rows, seeded

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def is_exact():
    return libfsdp._mesh._shared_memory or dist.get_world_size() == 1


@pytest.mark.meet(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2, 3)
def test_trains_as_the_unsharded_model(strategy, offload):
    options = dict(sharding_strategy=strategy, cpu_offload=CPUOffload(offload))
    model = wrapped(seeded(blocks), FSDP, **options)
    check_training(model, seeded(blocks), exact=is_exact())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, comm=("gloo",))
def test_trains_as_pytorchs(strategy):
    for prefetch in (None, *BackwardPrefetch):
        ours, theirs = (
            wrapped(seeded(blocks), wrap, sharding_strategy=strategy, backward_prefetch=prefetch) for wrap in BOTH
        )
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
        for step in range(3):
            losses = [loss_of(model, mine(rows(step, 5))) for model in (ours, theirs)]
            torch.testing.assert_close(*losses)
            for loss, optimizer in zip(losses, optimizers):
                loss.backward()
                optimizer.step()
            for (name, part), (other, theirs_part) in zip(ours.named_parameters(), theirs.named_parameters()):
                assert name == other
                torch.testing.assert_close(part, theirs_part)
                check_same_gradient(part, theirs_part, name)
            for optimizer in optimizers:
                optimizer.zero_grad()


@on_ranks(4, comm=("shm", "gloo"))
def test_hybrid_strategies():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group(1), mesh.get_group(0))
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        for where in (dict(device_mesh=mesh), dict(process_group=groups)):
            models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy, **where) for wrap in BOTH]
            check_training(models[0], seeded(blocks), exact=False)
            assert [tuple(p.shape) for p in models[0].parameters()] == [tuple(p.shape) for p in models[1].parameters()]


@on_ranks(2)
def test_an_optimizer_made_before_wrapping_trains():
    for early in (True, False):
        model, reference = seeded(blocks), seeded(blocks)
        make = functools.partial(torch.optim.AdamW, lr=1e-2)

        def grouped(of):
            named = list(of.named_parameters())
            biases = [p for name, p in named if name.endswith("bias")]
            weights = [p for name, p in named if not name.endswith("bias")]
            return make([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}])

        originals = list(model.parameters())
        optimizer = grouped(model) if early else None
        model = wrapped(model, FSDP)
        assert all(a is b for a, b in zip(model.parameters(), originals, strict=True))
        check_training(model, reference, is_exact(), optimizers=(optimizer or grouped(model), grouped(reference)))


@on_ranks(2, 3)
def test_parts_are_cut_as_pytorch_cuts():
    """Each parameter begins at 16 bytes, and the shares are equally long; 5 x 5, and 5 x 7 with 7 after a gap."""
    for make in (lambda: nn.Linear(5, 5, bias=False), lambda: nn.Linear(5, 7), lambda: nn.Linear(1, 1, bias=False)):
        ours, theirs = (wrap(seeded(make)) for wrap in BOTH)
        for _ in range(2):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert a.shape == b.shape
                assert torch.equal(a, b)
            for model in (ours, theirs):
                model(torch.ones(2, model.module.in_features)).sum().backward()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert a.grad.shape == a.shape  # empty ones too: every rank's optimizer writes
                assert (b.grad is None) == (b.numel() == 0)


@on_ranks(2, comm=("shm",))
def test_no_shard_keeps_shapes():
    for wrap in BOTH:
        model = quietly(wrap, seeded(lambda: nn.Linear(5, 7)), sharding_strategy=ShardingStrategy.NO_SHARD)
        assert [tuple(p.shape) for p in model.parameters()] == [(7, 5), (7,)]


@on_ranks(2)
def test_freezing_after_wrapping():
    model, reference = wrapped(seeded(blocks), FSDP), seeded(blocks)
    for frozen in (True, False):
        for parameter in (*model[2].parameters(), *reference[2].parameters()):
            parameter.requires_grad_(not frozen)
        check_training(model, reference, is_exact(), steps=2)


@on_ranks(2, 3)
def test_gradient_accumulation():
    """Steps with and without synchronization, in any order, add up to one."""
    for strategy in STRATEGIES:
        for synced in ([False, True], [True, True], [False, True, False, False, True]):
            models = [wrapped(seeded(blocks), wrap, sharding_strategy=strategy) for wrap in BOTH]
            reference = seeded(blocks)
            for step, sync in enumerate(synced):
                for model in models:
                    if sync:
                        loss_of(model, mine(rows(step, 5))).backward()
                    else:
                        with model.no_sync():
                            loss_of(model, mine(rows(step, 5))).backward()
                for part in rows(step, 5).split(4):
                    loss_of(reference, part).backward()
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(dist.get_world_size())
            for model in models:
                check_same(model, reference, exact=False)


@on_ranks(2, comm=("gloo",))
def test_no_sync_is_for_the_root():
    for wrap in BOTH:
        model = wrapped(seeded(blocks), wrap)
        loss_of(model, mine(rows(0, 5)))
        with pytest.raises(RuntimeError, match="on inner FSDP instances is not supported"):
            with model[1].no_sync():
                pass


@on_ranks(2, comm=("gloo",))
def test_clipping():
    for norm_type in (1, 2, float("inf")):
        for max_norm in (0.01, 100):
            ours, theirs = (wrapped(seeded(blocks), wrap) for wrap in BOTH)
            for model in (ours, theirs):
                loss_of(model, mine(rows(0, 5))).backward()
            norms = [model.clip_grad_norm_(max_norm, norm_type) for model in (ours, theirs)]
            torch.testing.assert_close(*norms)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                check_same_gradient(a, b)
    for model in (ours, theirs):
        with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
            model[1].clip_grad_norm_(1)
        model.zero_grad()
        with pytest.warns(UserWarning, match="with no gradients -- returning the total norm in the default dtype torch.float32"):
            norm = model.clip_grad_norm_(1)
        assert norm == 0 and norm.dtype == torch.float32


@on_ranks(2, comm=("gloo",))
def test_clipping_gradients_of_low_precision():
    for wrap in BOTH:
        model = wrap(seeded(lambda: nn.Linear(5, 7).bfloat16()))
        model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
        assert model.clip_grad_norm_(1).dtype == torch.bfloat16


class Seen(nn.Module):
    """Notes the dtypes and shapes that are there in its forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("offset", torch.ones(5))
        self.register_buffer("count", torch.ones(1, dtype=torch.long))
        self.seen = []

    def forward(self, x):
        parameters = {name: (tuple(p.shape), p.dtype) for name, p in self.named_parameters()}
        self.seen.append((x.dtype, self.inner.weight.dtype, self.offset.dtype, self.count.dtype, parameters))
        return self.inner(x) + self.offset


@on_ranks(2, comm=("gloo",))
def test_mixed_precision():
    policies = [
        MixedPrecision(param_dtype=torch.bfloat16),
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float64),
        MixedPrecision(buffer_dtype=torch.bfloat16),
        MixedPrecision(reduce_dtype=torch.bfloat16),
        MixedPrecision(param_dtype=torch.float64, cast_root_forward_inputs=False),
        MixedPrecision(param_dtype=torch.float64, cast_forward_inputs=True, cast_root_forward_inputs=False),
    ]
    for policy in policies:
        outcomes = []
        for wrap in BOTH:
            model = wrap(seeded(Seen), mixed_precision=policy)
            try:
                output = model(torch.ones(2, 5))
            except RuntimeError as error:
                outcomes.append(str(error).split("\n")[0])
                continue
            output.float().sum().backward()
            gradient = wholes_of(model)["inner.weight"][1]
            state = {name: value.dtype for name, value in model.state_dict().items()}
            outcomes.append((output.dtype, model.module.seen, model.module.offset.dtype, gradient.dtype, state))
        assert outcomes[0] == outcomes[1], policy


@on_ranks(2, comm=("gloo",))
def test_mixed_precision_below_the_root():
    """A nested wrapper casts its inputs only if it is told to; one of another precision sees what comes."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    for cast in (False, True):
        for root in (None, low):
            outcomes = []
            for wrap in BOTH:
                model = nn.Sequential(nn.Linear(5, 5), seeded(Seen))
                inner = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
                model[1] = wrap(model[1], mixed_precision=inner)
                model = wrap(model, mixed_precision=root)
                try:
                    model(torch.ones(2, 5)).float().sum().backward()
                    outcomes.append(model[1].module.seen)
                except RuntimeError as error:
                    outcomes.append(str(error).split("\n")[0])
            assert outcomes[0] == outcomes[1], (cast, root)


@on_ranks(2, comm=("gloo",))
def test_in_forward_names_and_shapes_are_those_of_the_unwrapped_module():
    for wrap in BOTH:
        model = wrap(seeded(Seen))
        model(torch.ones(2, 5))
        shapes = {name: shape for name, (shape, _) in model.module.seen[0][-1].items()}
        assert shapes == {"inner.weight": (5, 5), "inner.bias": (5,)}
        assert sum(p.numel() for p in model.parameters()) < 30


@on_ranks(2)
def test_experts_in_groups_of_one():
    """Each rank's own parameters, in a wrapper of one rank, beside those that all share."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    models = []
    for wrap in BOTH:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(seeded(lambda: nn.Linear(5, 5)), nn.Linear(5, 5))
        torch.manual_seed(100 + dist.get_rank())
        nn.init.normal_(model[1].weight)
        model[1] = quietly(wrap, model[1], process_group=own)
        models.append(wrap(model))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            loss_of(model, mine(rows(step, 5))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


@on_ranks(2, comm=("gloo",))
def test_half_after_wrapping():
    models = [wrap(seeded(lambda: nn.Linear(5, 7))).to(torch.bfloat16) for wrap in BOTH]
    for model in models:
        model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert torch.equal(a, b)
        check_same_gradient(a, b)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("before", [False, True])
@on_ranks(2)
def test_optimizers_that_would_step_in_backward_are_refused(before, use_orig_params):
    from torch.distributed.optim import _apply_optimizer_in_backward

    error, says = (NotImplementedError, "does not have") if use_orig_params else (RuntimeError, "only supported with")
    module = nn.Linear(4, 4)
    with pytest.raises(error, match=f"{says}.*"):
        if before:
            _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1}, register_hook=False)
        model = FSDP(module, use_orig_params=use_orig_params)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
        model(torch.ones(1, 4))


@pytest.mark.meet(2)
@pytest.mark.parametrize("trained", ["bias", "1.bias"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True)])
@on_ranks(2, 3, 4)
def test_ranks_without_elements_of_what_is_trained_go_along(make, trained):
    def build():
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        return model

    model, reference = quietly(FSDP, seeded(build)), seeded(build)
    optimizers = [make(each.parameters(), lr=0.1) for each in (model, reference)]
    check_training(model, reference, is_exact(), steps=4, optimizers=optimizers, shape=(7,))


@on_ranks(1, 2, 3)
def test_whole_parameters_between_a_forward_and_its_backward():
    for strategy in STRATEGIES:
        model, reference = wrapped(seeded(blocks), FSDP, sharding_strategy=strategy), seeded(blocks)

        def looked_at(each, batch, values=reference):
            loss = loss_of(each, batch)
            if each is not values:
                with summoned(each), torch.no_grad():
                    for (name, whole), other in zip(each.named_parameters(), values.parameters(), strict=True):
                        torch.testing.assert_close(whole, other, msg=lambda m, name=name: f"{name}: {m}")
                model.state_dict()
            return loss

        check_training(model, reference, exact=is_exact(), loss_of=looked_at)


@on_ranks(2, comm=("shm",))
def test_what_is_written_between_a_forward_and_its_backward():
    model = wrapped(seeded(blocks), FSDP)
    loss = loss_of(model, mine(rows(0, 5)))
    with summoned(model):
        model[0].weight.data.mul_(2)  # as in PyTorch: nobody is told
    loss.backward()
    with summoned(model):
        assert torch.equal(model[2].weight, seeded(blocks)[2].weight)
        assert torch.equal(model[0].weight, seeded(blocks)[0].weight * 2)
    loss = loss_of(model, mine(rows(0, 5)))
    with summoned(model), torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no")


@on_ranks(1, 2, comm=("shm",))
def test_a_model_goes_on_after_a_backward_that_broke_off():
    model, reference = wrapped(seeded(blocks), FSDP), seeded(blocks)
    hook = model[0].register_forward_hook(lambda _module, _given, output: Broken.apply(output))
    with pytest.raises(RuntimeError, match="no"):
        loss_of(model, mine(rows(0, 5))).backward()
    hook.remove()
    with pytest.raises(libfsdp.Error, match="call reset_iter_state.. on the root"):
        model(mine(rows(0, 5)))
    model.reset_iter_state()
    model.zero_grad()
    check_training(model, reference, exact=is_exact())
