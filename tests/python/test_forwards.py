"""Which forwards and backwards there may be."""

import collections
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import Error, MixedPrecisionPolicy, fully_shard
from subjects import (
    BATCH,
    check_hollow,
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
                if chunked and toggled:
                    assert module.head.weight.data_ptr() != 0, "kept from one chunk to the next"
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
        check_hollow(model.head.weight, "head.weight")


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


@on_ranks(2)
def test_a_child_alone_before_the_root_ever_ran():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for each in (model, reference):
        hidden = each[0](torch.ones(1, 5))
        assert hidden.shape == (1, 7)
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.outer(self.inner(torch.tanh(self.inner(x))))


@pytest.mark.parametrize("reshard", [None, True, False, 1])
@on_ranks(2, comm=("shm",))
def test_a_module_called_twice_in_one_forward(reshard):
    reference, model = seeded(Repeats), seeded(Repeats)
    for module in (model.inner, model):
        fully_shard(module, reshard_after_forward=reshard)
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch):
        x = self.embedding(batch.argmax(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def recomputed(blocks, kind):
    for i, block in enumerate(blocks):
        if kind == "composable":
            composable_checkpoint(block)
        elif kind == "wrapper":
            blocks[i] = checkpoint_wrapper(block)
        elif kind == "function":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.meet(2)
@pytest.mark.parametrize("reshard", [True, False, 1])
@pytest.mark.parametrize("kind", ["none", "composable", "wrapper", "function"])
@pytest.mark.parametrize("grouping", ["blocks", "lists", "tied"])
@on_ranks(2, comm=("shm",))
def test_groupings_with_recomputation(grouping, kind, reshard):
    make = lambda: Language(tied=grouping == "tied")  # noqa: E731
    reference, model = seeded(make), seeded(make)
    for each in (reference, model):
        recomputed(each.blocks, kind)
    if grouping == "lists":
        fully_shard(model.embedding, reshard_after_forward=reshard)
        model.embedding.set_unshard_in_backward(False)
        fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    check_training(model, reference, loss_of, (8,), exact=True, steps=2)


@on_ranks(2)
def test_a_weight_that_two_members_of_a_list_share():
    reference, model = (seeded(lambda: Language(tied=True)) for _ in range(2))
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.embedding, model.norm, model.head])
    fully_shard(model)
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    check_training(model, reference, loss_of, (8,), exact=True, steps=2)


class WithChunks(Head):
    """Its head is run by the loss, on one part after another."""

    def loss(self, batch, checkpointed=False):
        hidden = self(batch)
        run = functools.partial(checkpoint, self.head, use_reentrant=False) if checkpointed else self.head
        return sum(run(chunk).float().pow(2).sum() for chunk in hidden.chunk(2)) / 8


@on_ranks(2)
def test_grouped_as_ungrouped():
    """However a partial forward goes on, it makes no difference that a list was sharded as one unit."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    several = {}, dict(reshard_after_forward=1), dict(mp_policy=low)
    for checkpointed, options in itertools.product((False, True), several):
        grouped, ungrouped = seeded(WithChunks), seeded(WithChunks)
        fully_shard([grouped.norm, grouped.head], **options)
        for module in (ungrouped.norm, ungrouped.head):
            fully_shard(module, **options)
        losses = [fully_shard(model, **options).loss(mine(rows(0, 6)), checkpointed) for model in (grouped, ungrouped)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(grouped.parameters(), ungrouped.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(q.grad))
        outputs = grouped.norm(torch.rand(2, 6)), grouped.head(torch.rand(2, 6))
        assert all(out.dtype == torch.float32 for out in outputs), "cast as each of the two leaves"


@on_ranks(2)
def test_backwards_of_chunks_grouped_as_ungrouped():
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    several = {}, dict(reshard_after_forward=1), dict(mp_policy=low)
    for options, checkpointed, put_off in itertools.product(several, (False, True), (False, True)):
        grouped, ungrouped = seeded(Head), seeded(Head)
        fully_shard([grouped.norm, grouped.head], **options)
        for module in (ungrouped.norm, ungrouped.head):
            fully_shard(module, **options)
        for model in (grouped, ungrouped):
            fully_shard(model, **options)
            run = functools.partial(checkpoint, model.head, use_reentrant=False) if checkpointed else model.head
            hidden = model(mine(rows(0, 6)))
            leaf = hidden.detach().requires_grad_()
            for i, chunk in enumerate(leaf.chunk(2)):
                model.set_requires_gradient_sync(not put_off or i == 1)
                model.set_is_last_backward(i == 1)
                run(chunk).float().pow(2).sum().backward()
            hidden.backward(leaf.grad)
        for p, q in zip(grouped.parameters(), ungrouped.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(q.grad)), (options, checkpointed, put_off)


class Several(nn.Module):
    """Takes and gives what is no tensor: a list, a tuple, a named tuple, a dictionary."""

    Given = collections.namedtuple("Given", "left right")

    def __init__(self, kind):
        super().__init__()
        self.left, self.right, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, given):
        left, right = given.values() if isinstance(given, dict) else given
        left, right = self.left(left), self.right(right)
        made = {
            "list": lambda: [left, right],
            "tuple": lambda: (left, right),
            "named tuple": lambda: self.Given(left, right),
            "dictionary": lambda: dict(left=left, right=right),
        }
        return made[self.kind]()


@pytest.mark.parametrize("reshard", [True, False, 1])
@on_ranks(2, comm=("shm",))
def test_containers_between_modules_of_which_the_loss_uses_a_part(reshard):
    for kind, used in itertools.product(("list", "tuple", "named tuple", "dictionary"), (slice(0, 1), slice(0, 2))):
        make = lambda: nn.Sequential(*(Several(kind) for _ in range(3)))  # noqa: B023, E731
        reference, model = seeded(make), seeded(make)
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=reshard)

        def loss(module, batch):
            out = module((batch, batch * 2))
            parts = list(out.values() if isinstance(out, dict) else out)[used]  # noqa: B023
            return sum(part.pow(2).mean() for part in parts)

        for step in range(2):
            loss(model, mine(rows(step, 4))).backward()
            reference_backward(reference, loss, rows(step, 4))
            check_same(model, reference, what="gradients")
            assert (model[2].right._parameters["weight"].grad is None) == (used == slice(0, 1))
            model.zero_grad(), reference.zero_grad()


@on_ranks(2)
def test_evaluation_between_steps_with_frozen_units_in_between():
    make = lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(5)))  # noqa: E731
    reference, model = seeded(make), seeded(make)
    for each in (reference, model):
        for i in (1, 3):
            each[i].requires_grad_(False)
    for module in (*model, model):
        fully_shard(module)
    for thawed in ((), (1,), (1, 3)):
        for each in (reference, model):
            for i in thawed:
                each[i].requires_grad_(True)
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)
        with torch.no_grad():
            assert torch.equal(model(mine(rows(7, 5))), reference(mine(rows(7, 5))))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.armed:
            raise KeyError("on purpose")
        return gradient, None


@on_ranks(2)
def test_recovery_after_an_exception_in_backward():
    class Fails(nn.Module):
        armed = False

        def forward(self, x):
            return FailsInBackward.apply(x, self.armed)

    make = lambda: nn.Sequential(nn.Linear(5, 5), Fails(), nn.Linear(5, 5))  # noqa: E731
    reference, model = seeded(make), seeded(make)
    for module in (model[0], model[2], model):
        fully_shard(module)
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)
    model[1].armed = True
    loss = loss_of(model, mine(rows(0, 5)))
    with pytest.raises(KeyError, match="on purpose"):
        loss.backward(retain_graph=True)
    with pytest.raises(Error, match="reset_iter_state"):
        loss.backward()
    model[1].armed = False
    model.reset_iter_state()
    model.zero_grad()
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


class Probe(nn.Module):
    """Notes where its inputs are."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2)), []

    def forward(self, x, lengths):
        self.seen.append((x.device.type, lengths.device.type))
        return x * x


class Outer(Probe):
    """Gives the module below a tensor of the host's, and calls it again in backward."""

    def __init__(self):
        super().__init__()
        self.inner = Probe()

    def forward(self, x, lengths):
        super().forward(x, lengths)
        return checkpoint(self.inner, x, torch.ones(2), use_reentrant=False)


@on_ranks(1, comm=("shm",))
def test_only_the_module_that_begins_a_forward_moves_its_inputs():
    model = Outer()
    for module in (model.inner, model):
        state = fully_shard.state(fully_shard(module))
        state.device, state.moves_inputs, state.converts = torch.device("meta"), True, True
    x = torch.ones(2, device="meta", requires_grad=True)
    model(x, lengths=torch.ones(2)).sum().backward()
    assert model.seen == [("meta", "meta")] and model.inner.seen == [("meta", "cpu")] * 2
    model.inner(torch.ones(2), torch.ones(2))
    assert model.inner.seen[2:] == [("meta", "meta")]


class Bare(nn.Module):
    """Without a parameter."""

    def forward(self, pair, *, more):
        self.seen = [tensor.device.type for tensor in (pair[0], *pair[1], more["x"])]
        return pair[0]


@on_ranks(1, comm=("shm",))
def test_nested_inputs_of_a_module_without_parameters_move():
    model = Bare()
    state = fully_shard.state(fully_shard(model))
    state.device, state.moves_inputs, state.converts = torch.device("meta"), True, True
    x = torch.ones(2)
    model((x, (x, x)), more={"x": x})
    assert model.seen == ["meta"] * 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.rand(5, 5)), nn.Parameter(torch.rand(5))

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x, w: x @ w + self.other, lambda x, w: x - x @ w, (x, self.weight))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@on_ranks(1, 2)
def test_branches_that_torch_cond_chooses_from(dtype):
    reference, model = seeded(Branches), fully_shard(seeded(Branches), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    x = mine(rows(0, 5))
    for sign in (1, -1):
        with torch.no_grad():
            torch.testing.assert_close(model(sign * x), reference(sign * x), check_dtype=False)
        (model(sign * x) ** 2).sum().backward()
    for step in (1, -1):
        for part in rows(0, 5).split(len(x)):
            ((reference(step * part) ** 2).sum() / dist.get_world_size()).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.inner = nn.Parameter(torch.rand(1)), nn.Linear(5, 16)

    def forward(self, x):
        heads = self.inner(x).view(1, 1, -1, 16)
        return flex_attention(heads, heads, heads, score_mod=lambda score, b, h, i, j: score + self.bias[h])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@on_ranks(2)
def test_flex_attention_with_a_parameter_in_its_score():
    reference, model = seeded(Attention), fully_shard(seeded(Attention))
    with torch.no_grad():
        x = mine(rows(0, 5))
        torch.testing.assert_close(model(x), reference(x))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@on_ranks(2)
def test_vmap_over_samples(dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp), mp_policy=policy)
    x = mine(rows(0, 5))
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(model)(x), torch.vmap(reference)(x), check_dtype=False)
    torch.vmap(model)(x).sum().backward()
    for part in rows(0, 5).split(len(x)):
        (torch.vmap(reference)(part).sum() / dist.get_world_size()).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)
