"""Collectives: how many, over which groups, in whose memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, fully_shard
from subjects import check_training, loss_of, mine, mlp, rows, seeded, shard_with, whole


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
