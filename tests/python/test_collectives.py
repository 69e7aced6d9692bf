"""Collectives: how many, over which groups, in whose memory."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from subjects import (
    BATCH,
    check_hollow,
    check_same,
    check_training,
    loss_of,
    mine,
    mlp,
    recorded,
    reference_backward,
    rows,
    seeded,
    shard_with,
    whole,
)


def counted(model):
    """Counts what a model's units gather and reduce."""
    counts = dict(gather=0, reduce=0)

    def gather(output_tensor, input_tensor, group, async_op):
        counts["gather"] += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    def reduce(output_tensor, input_tensor, group, op, async_op):
        counts["reduce"] += 1
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.copy_(sum(parts.chunk(group.size())))

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


@on_ranks(4)
def test_which_units_reduce_while_gradients_accumulate():
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    offload = CPUOffloadPolicy(pin_memory=False)
    for mesh, policy in itertools.product((None, hybrid), (OffloadPolicy(), offload)):
        reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp), mesh=mesh, offload_policy=policy)
        averaged = []
        for name in ("", "0", "2"):
            model.get_submodule(name).set_all_reduce_hook(lambda gradient, name=name: averaged.append(name or "(root)"))
        every, root = ["(root)", "0", "2"], ["(root)"]
        for step, (switch, expected) in enumerate([
            (lambda: model.set_requires_gradient_sync(False), ([], [])),
            (lambda: model.set_requires_gradient_sync(True, recurse=False), (root, root)),
            (lambda: model.set_requires_gradient_sync(True), (every, every)),
            (lambda: model.set_requires_all_reduce(False), (every, every if mesh is None else [])),
            (lambda: model.set_requires_all_reduce(True, recurse=False), (every, every if mesh is None else root)),
            (lambda: model.set_requires_gradient_sync(True), (every, every)),
        ]):
            averaged.clear()
            switch()
            reduced = recorded(lambda: loss_of(model, mine(rows(step, 5))).backward())["start reduction"]
            assert (sorted(reduced), sorted(set(averaged))) == expected, (mesh, step)
            for part in rows(step, 5).split(BATCH):
                (loss_of(reference, part) / dist.get_world_size()).backward()
        check_same(model, reference, exact=False, what="gradients")
        model.zero_grad(set_to_none=False), reference.zero_grad(set_to_none=False)
        loss_of(model, mine(rows(9, 5))).backward()
        reference_backward(reference, loss_of, rows(9, 5))
        check_same(model, reference, exact=False, what="gradients")


class Around(nn.Module):
    """The root's own parameters are used first in a forward and last in a backward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(5, 5)
        self.blocks = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))

    def forward(self, x):
        return self.blocks(torch.tanh(self.embedding(x)))


@on_ranks(2)
def test_whether_modules_reshard_is_set_for_one_or_for_all_below():
    model = seeded(Around)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    batch = mine(rows(0, 5)).requires_grad_()

    def gathers_of_a_backward():
        for _ in range(2):  # the second knows the order
            loss = loss_of(model, batch)
            gathered = recorded(loss.backward)["gather"]
        return {unit.removeprefix("blocks.") for unit in gathered}

    gathered = gathers_of_a_backward()
    assert {"0", "1"} <= gathered
    model.set_reshard_after_forward(False, recurse=False)
    assert gathers_of_a_backward() == gathered
    model.set_reshard_after_forward(False)
    assert gathers_of_a_backward() == set()
    model.blocks[0].set_reshard_after_forward(True)
    assert gathers_of_a_backward() == {"0"}
    for module in (model, *model.blocks):
        module.reshard()
    loss = loss_of(model, batch)
    for module in (model, *model.blocks):
        module.reshard()
    assert set(recorded(loss.backward)["gather"]) == {"(root)", *(f"blocks.{i}" for i in range(4))}, "freed by hand"


@on_ranks(2)
def test_a_root_stays_whole_until_its_backward_whatever_it_was_told():
    for told in (None, True):
        model, batch = seeded(Around), mine(rows(0, 5)).requires_grad_()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, reshard_after_forward=told)
        for _ in range(2):
            counts = recorded(lambda: loss_of(model, batch).backward())  # noqa: B023
        assert counts["gather"]["(root)"] == 1


@on_ranks(2)
def test_what_was_unsharded_by_hand_is_kept_until_it_was_used():
    model = seeded(Around)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    first, second, third, last = model.blocks
    first.unshard()
    x = torch.rand(2, 5)
    for block in (second, third, last):
        block(x)
    assert first.weight.data_ptr() != 0
    for block in (first, second, third):
        block(x)
    check_hollow(first.weight, "blocks.0.weight")


@on_ranks(2)
def test_modules_of_a_list_are_gathered_and_reduced_at_once():
    model = seeded(Around)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model)
    for _ in range(2):
        counts = recorded(lambda: loss_of(model, mine(rows(0, 5))).backward())
    names = {unit.name: unit.numel for unit in libfsdp.describe(model).units}
    (pair,) = names.keys() - {"(root)"}
    assert names[pair] == 2 * 30 and "blocks.0" in pair and "blocks.1" in pair
    assert counts["start reduction"] == {pair: 1, "(root)": 1} and counts["gather"][pair] <= 2


@on_ranks(1, comm=("gloo",))
def test_one_rank_exchanges_nothing():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)
    counts = recorded(lambda: loss_of(model, rows(0, 5)).backward())
    assert counts["touch"] and not counts["wait for collective"]


@on_ranks(4)
def test_divided_by_the_given_factor_on_any_mesh_and_in_any_precision():
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for shape, policy in itertools.product(((2, 2), (4, 1), (1, 4)), (MixedPrecisionPolicy(), low)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        plain, model = (shard_with(fully_shard, seeded(mlp), mesh=mesh, mp_policy=policy) for _ in range(2))
        model.set_gradient_divide_factor(16.0)
        for each in (plain, model):
            loss_of(each, mine(rows(0, 5))).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            factor = 4.0 if name.startswith("3.") else 1.0
            assert torch.equal(whole(p.grad), whole(q.grad) * factor), (shape, name)


@on_ranks(2, 4)
def test_half_precision_sums_do_not_overflow():
    ranks = dist.get_world_size()
    meshes = [None, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))]
    for mesh in meshes:
        model = fully_shard(
            nn.Linear(1, 4, bias=False), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)
        )
        model(torch.full((1, 1), 40000.0)).sum().backward()
        assert torch.equal(whole(next(model.parameters()).grad), torch.full((4, 1), 40000.0)), mesh


@on_ranks(2)
def test_modules_that_are_to_be_gathered_ahead():
    model = seeded(Around)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    first, second, third, last = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    gathered = recorded(lambda: first(torch.rand(2, 5)))["gather"]
    assert set(gathered) == {"blocks.0", "blocks.1", "blocks.2"}
    model.reset_iter_state()
    last.set_modules_to_backward_prefetch([third, second])
    before_last = third(second(first(torch.tanh(model.embedding(torch.rand(2, 5))))))
    out = last(before_last)
    for block in model.blocks:
        block.reshard()
    gathered = recorded(lambda: torch.autograd.grad(out.sum(), before_last))["gather"]
    assert set(gathered) == {"blocks.3", "blocks.2", "blocks.1"}


@on_ranks(2)
def test_a_list_of_what_to_gather_ahead_replaces_the_schedules_advice():
    model, batch = seeded(Around), mine(rows(0, 5))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        loss_of(model, batch).backward()
    first, _, third, _ = model.blocks
    first.set_modules_to_forward_prefetch([third])
    gathered = recorded(lambda: first(torch.tanh(model.embedding(batch))))["gather"]
    assert set(gathered) == {"(root)", "blocks.0", "blocks.2"}


@on_ranks(2)
def test_gathered_ahead_in_a_recomputation():
    reference, model = seeded(Around), seeded(Around)
    for block in model.blocks:
        composable_checkpoint(block)
        fully_shard(block)
    fully_shard(model)
    for each, following in itertools.pairwise(model.blocks):
        each.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([each])
    check_training(model, reference, loss_of, (5,), exact=True)
    loss = loss_of(model, mine(rows(9, 5)))
    gathered = recorded(loss.backward)["gather"]
    assert gathered and set(gathered.values()) == {1}, "a recomputation frees nothing"
