"""What programs written for PyTorch's fully_shard rely on, beyond what the other files test."""

import contextlib
import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from subjects import BATCH, check_same, check_training, mine, mlp, reference_backward, rows, seeded, whole


def loss_of(model, batch):
    return model(batch).float().pow(2).mean()


def shard_with(shard, model, **options):
    for block in (model[0], model[2], model):
        shard(block, **options)
    return model


def even():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 12), nn.GELU()), nn.Linear(12, 4))


def is_sharded(parameter):
    return isinstance(parameter, DTensor)


# -- what fully_shard manages


@on_ranks(2, comm=("shm",))
def test_replicated_subtrees_are_left_alone():
    model, reference = seeded(mlp), seeded(mlp)
    replicate(model[2])
    fully_shard(model)
    assert [is_sharded(p) for p in model.parameters()] == [True, True, False, False, True, True]
    loss_of(model, mine(rows(0, 5))).backward()
    reference_backward(reference, loss_of, rows(0, 5))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_a_module_that_stands_in_two_places():
    def make():
        block = nn.Linear(5, 5)
        return nn.Sequential(block, nn.Tanh(), block)

    for units in ([], [0]):
        reference, model = seeded(make), seeded(make)
        for i in units:
            fully_shard(model[i])
        fully_shard(model)
        assert len(list(model.parameters())) == 2 and model[0] is model[2]
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_a_list_as_the_root():
    reference, model = seeded(mlp), seeded(mlp)
    fully_shard([model[0], model[2], model[3]])
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_layers_are_sharded_as_they_are_made():
    """Where one parameter lay another may come to lie: they are not the same."""
    layers = []
    for _ in range(20):
        layers.append(fully_shard(nn.Linear(4, 4)))
        gc.collect()
    model = fully_shard(nn.Sequential(*layers))
    loss_of(model, torch.rand(2, 4)).backward()
    assert all(p.grad is not None for p in model.parameters()) and len(list(model.parameters())) == 40


@on_ranks(2)
def test_frozen_eight_bit_parameters_in_the_same_unit():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            coarse = torch.rand(6, 4).to(torch.float8_e4m3fn)
            self.table = nn.Parameter(coarse, requires_grad=False)
            self.index = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x):
            return self.linear(x) @ self.table.float().T + self.index.sum()

    reference, model = seeded(Mixed), fully_shard(seeded(Mixed))
    assert torch.equal(model(torch.ones(1, 4)), reference(torch.ones(1, 4)))
    loss_of(model, mine(rows(0, 4))).backward()
    assert model.linear._parameters["weight"].grad is not None
    assert model._parameters["table"].grad is None


@on_ranks(4, comm=("shm",))
def test_replicas_keep_what_they_were_made_with():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    model = fully_shard(seeded(mlp, seed=replica), mesh=mesh)
    for p, q in zip(model.parameters(), seeded(mlp, seed=replica).parameters(), strict=True):
        assert torch.equal(whole(p.to_local() * 1), whole(p.to_local()))
        rows_of_mine = q.chunk(2)[mesh["shard"].get_local_rank()]
        assert torch.equal(p.to_local(), rows_of_mine), "nothing is broadcast"
    for p in model.parameters():  # the user does it
        dist.broadcast(p.to_local(), group_src=0, group=mesh.get_group("replicate"))
    for p, q in zip(model.parameters(), seeded(mlp, seed=0).parameters(), strict=True):
        assert torch.equal(model.get_submodule("0").weight.shape and whole(p), q)


@on_ranks(2, comm=("shm",))
def test_meta_device_context_and_low_precision():
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 1))
            for layer in model:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        dtype = policy.param_dtype or torch.float32
        out = model(torch.ones(2, 8))
        assert out.dtype == dtype and torch.equal(out, torch.full((2, 1), 3.8125, dtype=dtype))


@on_ranks(2)
def test_negative_dimensions_and_contiguous_shards():
    for dim in (-1, 1):
        model = seeded(even)
        fully_shard(model, shard_placement_fn=lambda p, dim=dim: Shard(dim) if p.ndim == 2 else None)
        reference = seeded(even)
        assert model[0]._parameters["weight"].placements == (Shard(1),)
        check_training(model, reference, loss_of, (4,), exact=True, steps=2)
        loss_of(model, mine(rows(0, 4))).backward()
        for p in model.parameters():
            assert p.is_contiguous() and p.to_local().is_contiguous() and p.grad.to_local().is_contiguous()
        assert model[0].weight.is_contiguous()


# -- which forwards and backwards there may be


@on_ranks(2)
def test_a_forward_without_inputs():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self):
            return self.second(self.first.weight + self.first.bias)

    model, reference = seeded(Alone), seeded(Alone)
    fully_shard(model.first)
    fully_shard(model)
    check_training(model, reference, lambda module, _: module().pow(2).sum(), (1,), exact=True, steps=2)


@on_ranks(2)
def test_a_part_alone_after_the_whole():
    model, reference = shard_with(fully_shard, seeded(mlp)), seeded(mlp)
    model._set_unshard_async_op(True)
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)
    part = lambda module, batch: module[0](batch).pow(2).mean()  # noqa: E731
    part(model, mine(rows(0, 5))).backward()
    reference_backward(reference, part, rows(0, 5))
    check_same(model, reference, what="gradients")


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.norm(self.body(x))


def grouped_head(**options):
    model = seeded(Head)
    fully_shard([model.norm, model.head], **options)
    return fully_shard(model, **options)


@on_ranks(2)
def test_each_chunk_of_a_loss_with_a_backward_of_its_own():
    for sync_every, toggled in itertools.product((True, False), (True, False)):
        reference, model = seeded(Head), grouped_head()
        if toggled:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)

        def step(module, batch, chunked):
            hidden = module(batch)
            leaf = hidden.detach().requires_grad_(True)
            chunks = leaf.chunk(2)
            for i, chunk in enumerate(chunks):
                if chunked and not sync_every:
                    module.set_requires_gradient_sync(i == len(chunks) - 1)
                (module.head(chunk).pow(2).sum() / 8).backward()
            if chunked:
                module.set_requires_gradient_sync(True)
            hidden.backward(leaf.grad)

        step(model, mine(rows(0, 6)), True)
        for part in rows(0, 6).split(BATCH):
            step(reference, part, False)
        for p in reference.parameters():
            p.grad.div_(dist.get_world_size())
        check_same(model, reference, exact=False, what="gradients")
        model.head.reshard()
        with pytest.raises(RuntimeError, match="head.weight.*sharded at this moment"):
            model.head.weight.data_ptr()


@on_ranks(2)
def test_two_partial_forwards_before_one_backward():
    model = grouped_head()
    (model(mine(rows(0, 6))).sum() + model(mine(rows(1, 6))).pow(2).sum()).backward()
    assert model.norm._parameters["weight"].grad is not None
    assert model.head._parameters["weight"].grad is None


@on_ranks(2)
def test_inputs_are_cast_for_each_module_of_a_list():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = seeded(Head)
    fully_shard([model.norm, model.head], mp_policy=policy)
    assert model.norm(torch.rand(2, 6)).dtype == model.head(torch.rand(2, 6)).dtype == torch.bfloat16


@on_ranks(2)
def test_two_forwards_with_checkpoints_before_one_backward():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def preference(module, batch):
        return (module(batch) - module(batch.flip(0))).pow(2).mean()

    reference, model = seeded(Nested), seeded(Nested)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    check_training(model, reference, preference, (5,), exact=True, steps=2)


@on_ranks(2)
def test_other_kinds_of_activation_checkpointing():
    for kind in ("composable", "wrapper"):
        reference, model = seeded(mlp), seeded(mlp)
        for i in (0, 2):
            if kind == "composable":
                composable_checkpoint(model[i])
            else:
                model[i] = checkpoint_wrapper(model[i])
            fully_shard(model[i])
        fully_shard(model)
        loss_of(model, mine(rows(0, 5))).backward()
        reference_backward(reference, loss_of, rows(0, 5))
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(whole(p.grad), q.grad)


@on_ranks(2)
def test_microbatches_in_a_pipeline():
    """Forwards and backwards in turns, one synchronization."""
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for module in (model, model[0], model[2]):
        module.unshard(async_op=True)
    batches = [mine(rows(step, 5)) for step in range(3)]
    losses = [loss_of(model, batches[0])]
    for i in range(3):
        if i + 1 < 3:
            losses.append(loss_of(model, batches[i + 1]))
        model.set_requires_gradient_sync(i == 2)
        model.set_is_last_backward(i == 2)
        losses[i].backward()
    for step in range(3):
        for part in rows(step, 5).split(BATCH):
            loss_of(reference, part).backward()
    for p in reference.parameters():
        p.grad.div_(dist.get_world_size())
    check_same(model, reference, exact=False, what="gradients")


@on_ranks(2)
def test_a_list_of_which_one_never_runs():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.never, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.last(self.used(x))

    reference, model = seeded(Some), seeded(Some)
    fully_shard([model.used, model.never])
    fully_shard(model)
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)
    assert model.never._parameters["weight"].grad is None


@on_ranks(2)
def test_prefetching_what_backward_is_done_with():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp), reshard_after_forward=True)
    model[0].set_modules_to_backward_prefetch([model[2]])
    check_training(model, reference, loss_of, (5,), exact=True)


@on_ranks(2)
def test_resharded_by_hand_between_forward_and_backward():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp), reshard_after_forward=False)
    loss = loss_of(model, mine(rows(0, 5)))
    for module in (model, model[0], model[2]):
        module.reshard()
    loss.backward()
    reference_backward(reference, loss_of, rows(0, 5))
    check_same(model, reference, what="gradients")


@on_ranks(2, comm=("shm",))
def test_forward_mode_differentiation():
    for reshard in (True, False):
        model, reference = seeded(mlp), seeded(mlp)
        shard_with(fully_shard, model, reshard_after_forward=reshard)
        point, direction = torch.rand(2, 5), torch.rand(2, 5)
        got, expected = (torch.func.jvp(each, (point,), (direction,)) for each in (model, reference))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# -- collectives


def counted(model):
    """Counts what a model's units gather and reduce."""
    counts = dict(gather=0, reduce=0)

    def gather(output_tensor, input_tensor, group, async_op):
        counts["gather"] += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    def reduce(output_tensor, input_tensor, group, op, async_op):
        counts["reduce"] += 1
        parts = [torch.empty_like(output_tensor) for _ in range(group.size())]
        dist.all_to_all(parts, list(input_tensor.chunk(group.size())), group=group)
        output_tensor.copy_(sum(parts))

    for module in model.modules():
        if isinstance(module, libfsdp.FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
    return counts


@on_ranks(2, comm=("gloo",))
def test_how_many_collectives_a_step_takes():
    for reshard, backward_gathers in ((True, 3), (None, 2), (False, 0)):
        model = shard_with(fully_shard, seeded(mlp), reshard_after_forward=reshard)
        counts = counted(model)
        for step in range(4):
            counts.update(gather=0, reduce=0)
            loss = loss_of(model, mine(rows(step, 5)))
            forward = counts["gather"]
            loss.backward()
            if step > 0:  # the schedule is known; before, two units are kept
                assert forward == 3 and counts["gather"] - forward <= backward_gathers, (reshard, step)
            assert counts["reduce"] == 3
        model.set_requires_gradient_sync(False)
        counts.update(reduce=0)
        loss_of(model, mine(rows(0, 5))).backward()
        assert counts["reduce"] == 0
        model.set_requires_gradient_sync(True)


@on_ranks(2, comm=("gloo",))
def test_whole_parameters_kept_over_the_microbatches_of_a_step():
    model = shard_with(fully_shard, seeded(mlp), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    counts = counted(model)
    for _ in range(3):
        loss_of(model, mine(rows(0, 5))).backward()
    assert counts["gather"] == 3
    model.set_reshard_after_backward(True)
    loss_of(model, mine(rows(0, 5))).backward()
    loss_of(model, mine(rows(0, 5)))
    assert counts["gather"] == 6


@on_ranks(4, comm=("shm",))
def test_a_hook_in_place_of_the_second_mesh_dimension():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = shard_with(fully_shard, seeded(mlp), mesh=mesh)
    hooked = shard_with(fully_shard, seeded(mlp), mesh=mesh["shard"])
    between = mesh.get_group("replicate")

    def average(gradient):
        dist.all_reduce(gradient, group=between)
        gradient.div_(2)

    for module in (hooked, hooked[0], hooked[2]):
        module.set_all_reduce_hook(average)
    for model in (hybrid, hooked):
        loss_of(model, mine(rows(0, 5))).backward()
    for p, q in zip(hybrid.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), q.grad.to_local())


@on_ranks(1)
def test_one_rank_divides_by_the_factor_it_is_given():
    model, reference = fully_shard(seeded(mlp)), seeded(mlp)
    for factor in (None, 1.0, 4.0):
        model.zero_grad(), reference.zero_grad()
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        loss_of(model, rows(0, 5)).backward()
        loss_of(reference, rows(0, 5)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(whole(p.grad), q.grad / (factor or 1.0))


@on_ranks(2)
def test_the_process_groups_memory_gives_way_to_custom_collectives():
    model = fully_shard(seeded(mlp))
    model.set_allocate_memory_from_process_group_for_comm(True)
    counted(model)
    with pytest.raises(AssertionError, match="collectives of its own"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2)
def test_hybrid_precision_offload_and_checkpoints_together():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for pin in (True, False):
        reference, model = seeded(mlp), seeded(mlp)
        composable_checkpoint(model[2])
        shard_with(fully_shard, model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        check_training(model, reference, loss_of, (5,), exact=False, steps=2)


# -- precision


@on_ranks(2)
def test_reduce_dtype_after_a_first_forward_with_everything_frozen():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    model = seeded(mlp)
    model.index = nn.Parameter(torch.arange(4), requires_grad=False)
    fully_shard(model, mp_policy=policy)
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.dtype))
    model.requires_grad_(False)
    model(mine(rows(0, 5)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "index")
    loss_of(model, mine(rows(0, 5))).backward()
    assert set(seen) == {torch.float32}
    assert all(p.grad.dtype == torch.float32 for n, p in model.named_parameters() if n != "index")


@on_ranks(2)
def test_unsynchronized_gradients_add_in_the_reduce_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(1, 1, bias=False), mp_policy=policy)
    for i, x in enumerate((256.0, 1.0, 1.0)):  # in bfloat16 the ones would get lost
        model.set_requires_gradient_sync(i == 2)
        model(torch.full((1, 1), x)).sum().backward()
    assert whole(next(model.parameters()).grad).item() == 258.0


@on_ranks(2)
def test_the_given_reduce_dtype_outlives_a_conversion():
    model = seeded(mlp).bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model.to(torch.float32)
    seen = []
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.dtype))
    loss_of(model, mine(rows(0, 5))).backward()
    assert set(seen) == {torch.bfloat16} and next(model.parameters()).grad.dtype == torch.float32


class TwoInputs(nn.Module):
    """The second is made on the way."""

    def __init__(self, factory=lambda x: torch.ones_like(x, dtype=torch.float32)):
        super().__init__()
        self.outer, self.inner, self.seen = nn.Linear(4, 4), Inner(), factory

    def forward(self, x):
        return self.inner(self.outer(x), self.seen(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, other):
        self.dtypes = x.dtype, other.dtype
        return self.linear(x) + other


@on_ranks(2, comm=("shm",))
def test_inputs_are_cast_where_the_module_says_so():
    low = torch.float16
    for cast in (True, False):
        for shard in (fully_shard, torch_fsdp.fully_shard):
            model = TwoInputs()
            shard(model.inner, mp_policy=MixedPrecisionPolicy(param_dtype=low, cast_forward_inputs=cast))
            shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low))
            with contextlib.nullcontext():
                model(torch.rand(2, 4))
            assert model.inner.dtypes == (low, low if cast else torch.float32), (cast, shard)
        alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(
            alone[1], mp_policy=MixedPrecisionPolicy(param_dtype=low, output_dtype=torch.float32, cast_forward_inputs=True)
        )
        fully_shard(alone)
        assert alone(torch.rand(2, 4)).dtype == torch.float32


@on_ranks(2, comm=("shm",))
def test_casts_are_repeated_in_a_recomputation():
    seen = []

    class Watches(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    model = nn.Sequential(Watches(4, 4), Watches(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model)
    out = checkpoint(model, torch.rand(2, 4), use_reentrant=False, early_stop=False)
    out.sum().backward()
    assert out.dtype == torch.float32 and seen == [torch.bfloat16] * 4


@on_ranks(2, comm=("shm",))
def test_norms_in_low_precision():
    for dtype in (torch.bfloat16, torch.float16):
        layer_norm = nn.LayerNorm(4)
        for norm, shape in ((layer_norm, (2, 4)), (nn.BatchNorm1d(4), (3, 4)), (nn.BatchNorm2d(4), (2, 4, 3, 3))):
            gradients = []
            for shard in (fully_shard, torch_fsdp.fully_shard):
                model = nn.Sequential(copy.deepcopy(norm))
                shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
                shard(model)
                try:
                    model(torch.rand(shape)).sum().backward()
                    gradients.append([p.grad.dtype for p in model.parameters()])
                except RuntimeError as error:  # running statistics keep full precision, which not every kernel takes
                    gradients.append(str(error))
            assert gradients[0] == gradients[1] and (gradients[0] == [torch.float32] * 2 or norm is not layer_norm)


# -- frozen parameters, other owners, hooks


@on_ranks(2)
def test_frozen_and_trainable_uses_of_the_same_layers():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for each in (reference, model):
        for parameter in each[2].parameters():
            parameter.requires_grad_(False)

    def several(module, batch):
        with torch.no_grad():
            start = module[0](batch)
        return (module[3](module[2](start)) + module(batch)).pow(2).mean()

    check_training(model, reference, several, (5,), exact=True, steps=2)


@on_ranks(2)
def test_only_trainable_gradients_are_reduced():
    sizes = []
    model = seeded(mlp)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    fully_shard(model)
    model.set_all_reduce_hook(lambda gradient: sizes.append(gradient.numel()))
    loss_of(model, mine(rows(0, 5))).backward()
    assert sum(sizes) == sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)


@on_ranks(2, comm=("gloo",))
def test_between_modules_that_ddp_owns():
    from torch.nn.parallel import DistributedDataParallel

    reference, model = seeded(mlp), seeded(mlp)
    outer = [*model[0].parameters(), *model[3].parameters()]
    fully_shard(model[2], ignored_params=set(outer))
    fully_shard(model, ignored_params=set(outer))
    model[0], model[3] = DistributedDataParallel(model[0]), DistributedDataParallel(model[3])
    loss_of(model, mine(rows(0, 5))).backward()
    reference_backward(reference, loss_of, rows(0, 5))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert is_sharded(p) == (not any(p is each for each in outer))
        torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_a_tied_embedding_whose_rows_do_not_divide():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.embedding(tokens)))

    reference, model = seeded(Language), fully_shard(seeded(Language))
    tokens = torch.arange(7).repeat(2, 1)
    before = whole(next(model.parameters())).clone()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        each(tokens).pow(2).sum().backward()
        optimizer.step()
    after = whole(next(model.parameters()))
    torch.testing.assert_close(after, reference.embedding.weight.detach())
    assert (after != before).any(dim=1).all(), "every row was updated"


@on_ranks(2)
def test_state_dict_after_a_forward_that_keeps_the_wholes():
    model = shard_with(fully_shard, seeded(mlp), reshard_after_forward=False)
    model(mine(rows(0, 5)))
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        assert isinstance(state[name], DTensor) and state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    others = {name: torch.zeros_like(value) for name, value in state.items()}
    model.load_state_dict(others)
    assert model(mine(rows(0, 5))).abs().max() == 0
