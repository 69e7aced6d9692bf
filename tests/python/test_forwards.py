"""Which forwards and backwards there may be."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import (
    BATCH,
    check_same,
    check_training,
    loss_of,
    mine,
    mlp,
    reference_backward,
    rows,
    seeded,
    shard_with,
    whole,
)


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
