"""What users put in the places of parameters of ``FullyShardedDataParallel`` with ``use_orig_params=True``, and of gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp1_subjects import BOTH, FSDP, summoned
from harness import on_ranks
from subjects import seeded


def linear(wrap, **options):
    return wrap(seeded(lambda: nn.Linear(5, 7)), **options)


def weight_of(model):
    return dict(model.named_parameters())["_fsdp_wrapped_module.weight"]


def whole_weight(model):
    with summoned(model, writeback=False):
        return model.module.weight.detach().clone()


@on_ranks(2, comm=("shm",))
def test_a_whole_parameter_or_a_part_is_taken():
    whole = torch.arange(35.0).view(7, 5)
    for wrap in BOTH:
        model = linear(wrap)
        part = weight_of(model)
        part.data = torch.full_like(part, 3)
        model(torch.ones(1, 5))
        assert torch.equal(whole_weight(model), torch.full((7, 5), 3.0))
        model.module.weight = nn.Parameter(torch.full_like(part, 4))
        model(torch.ones(1, 5)).sum().backward()
        assert torch.equal(whole_weight(model), torch.full((7, 5), 4.0))
        torch.optim.SGD(model.parameters(), 1.0).step()
        assert torch.equal(whole_weight(model), torch.full((7, 5), 3.0))
    model = linear(FSDP)
    model.module.weight = nn.Parameter(whole.clone())
    model(torch.ones(1, 5)).sum().backward()
    assert torch.equal(whole_weight(model), whole) and weight_of(model).grad is not None
    model.module.weight.data = whole + 1
    model(torch.ones(1, 5))
    assert torch.equal(whole_weight(model), whole + 1)


@on_ranks(2, comm=("shm",))
def test_other_shapes_are_errors():
    for wrap in BOTH:
        for shape in ((7, 6), (3,)):
            model = linear(wrap)
            model.module.weight = nn.Parameter(torch.ones(shape))
            with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
                model(torch.ones(1, 5))


@on_ranks(2, comm=("shm",))
def test_gradients_that_users_set_are_added_to():
    for wrap in BOTH:
        model = linear(wrap)
        model(torch.ones(1, 5)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3) if parameter.numel() else parameter.grad
        model(torch.ones(1, 5)).sum().backward()
        for parameter in model.parameters():
            assert not parameter.numel() or torch.equal(parameter.grad, torch.full_like(parameter, 4))
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.ones(1, 5)).sum().backward()
        assert all(p.grad is None or torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@on_ranks(2, comm=("shm",))
def test_parts_are_not_given_whole_values_past_their_module():
    model = linear(FSDP)
    weight_of(model).data = torch.ones(7, 5)
    with pytest.raises(RuntimeError, match="give it this rank's piece only"):
        model(torch.ones(1, 5))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@on_ranks(2, comm=("shm",))
def test_a_backward_is_of_the_parameters_of_its_forward(strategy):
    """Others that were put in their places since are those of the next forward."""
    model = linear(FSDP, sharding_strategy=strategy)
    x = torch.ones(1, 5, requires_grad=True)
    before, former = whole_weight(model), weight_of(model)
    loss = model(x).sum()
    model.module.weight = nn.Parameter(torch.zeros(7, 5))
    loss.backward()
    torch.testing.assert_close(x.grad, before.sum(0, keepdim=True))
    assert former.grad is not None and weight_of(model).grad is None
    assert torch.equal(model(x)[0], model.module.bias)
