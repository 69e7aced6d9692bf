"""Frozen parameters, other owners, hooks."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import fully_shard
from subjects import check_training, is_sharded, loss_of, mine, mlp, reference_backward, rows, seeded, shard_with, whole


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


class Product(torch.autograd.Function):
    """Which decides what needs a gradient before any operator runs."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.rand(5, 5)), nn.Parameter(torch.rand(5))

    def forward(self, x):
        self.trainable = self.weight.requires_grad
        return Product.apply(x, self.weight) * self.scale


@on_ranks(1, 2)
def test_who_asks_before_any_operator_sees_what_was_frozen_since():
    for frozen_first, by_attribute in itertools.product((True, False), (True, False)):
        reference, model = seeded(Asking), seeded(Asking)
        for each in (reference, model):
            each.weight.requires_grad_(not frozen_first)
        fully_shard(model)
        trainable = not frozen_first
        for _ in range(3):
            check_training(model, reference, loss_of, (5,), exact=True, steps=2)
            assert model.trainable == trainable
            trainable = not trainable
            for each in (reference, model):
                (weight, _) = each.parameters()
                if by_attribute:
                    weight.requires_grad = trainable
                else:
                    weight.requires_grad_(trainable)


@on_ranks(2)
def test_only_trainable_gradients_are_reduced():
    for frozen_first, checkpointed in itertools.product((True, False), (True, False)):
        sizes = []
        model = seeded(mlp)
        if frozen_first:
            model[2].requires_grad_(False)
        fully_shard(model)
        model[2].requires_grad_(False)
        model.set_all_reduce_hook(lambda gradient: sizes.append(gradient.numel()))  # noqa: B023
        call = functools.partial(checkpoint, model, use_reentrant=False) if checkpointed else model
        loss_of(call, mine(rows(0, 5))).backward()
        of_first_rank = lambda p: -(-len(p) // dist.get_world_size()) * p[0].numel()  # noqa: E731
        assert sizes == [sum(of_first_rank(p) for p in model.parameters() if p.requires_grad)]
        assert all(p.grad is None for p in model[2].parameters())


@on_ranks(2)
def test_units_with_frozen_parameters_reduce_while_backward_goes_on():
    model, order = seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))), []
    for i, layer in enumerate(model):
        layer.bias.requires_grad_(False)
        fully_shard(layer).set_all_reduce_hook(lambda _, i=i: order.append(f"reduced {i}"))
    fully_shard(model)
    model[0].weight.register_hook(lambda _: order.append("gradient 0"))
    loss_of(model, mine(rows(0, 5))).backward()
    assert order.index("reduced 2") < order.index("gradient 0"), order


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
