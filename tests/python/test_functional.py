"""``torch.func.functional_call``: other tensors in the place of sharded parameters, for a while."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import libfsdp
from harness import on_ranks
from libfsdp import fully_shard
from subjects import check_same, check_training, loss_of, mine, mlp, reference_backward, rows, seeded


def sharded_mlp(seed=1):
    model = seeded(mlp, seed)
    for block in (model[0], model[2], model):
        fully_shard(block)
    return model


def others(wrap=lambda tensor: tensor.detach().clone().requires_grad_()):
    return {name: wrap(parameter) for name, parameter in seeded(mlp, 7).named_parameters()}


@on_ranks(2)
def test_other_tensors_are_used_and_get_the_gradients():
    model, reference = sharded_mlp(), seeded(mlp)
    batch = mine(rows(0, 5))
    for wrap in (lambda t: t.detach().clone().requires_grad_(), lambda t: nn.Parameter(t.detach().clone()), lambda t: t * 1):
        ours, theirs = others(wrap), others(wrap)
        out, expected = functional_call(model, ours, (batch,)), functional_call(reference, theirs, (batch,))
        assert torch.equal(out, expected)
        gradients = (torch.autograd.grad(each.sum(), list(given.values())) for each, given in ((out, ours), (expected, theirs)))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        assert torch.equal(model(batch), reference(batch)), "and are gone"
        assert type(model[0].weight) is nn.Parameter and all(hasattr(p, "placements") for p in model.parameters())
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_some_tensors_of_a_module_inside():
    model, reference = sharded_mlp(), seeded(mlp)
    given = {"0.bias": torch.full((9,), 0.5)}
    x = torch.rand(2, 7)
    assert torch.equal(functional_call(model[2], given, (x,)), functional_call(reference[2], given, (x,)))
    plain = {"bias": torch.full((9,), 0.25)}
    assert torch.equal(functional_call(model[2][0], plain, (x,)), functional_call(reference[2][0], plain, (x,)))
    assert torch.equal(model[2](x), reference[2](x))
    mixed = {"0.weight": torch.ones(7, 5)}
    functional_call(model, mixed, (mine(rows(0, 5)),)).pow(2).mean().backward()

    def mixed_loss(module, batch):
        return functional_call(module, mixed, (batch,)).pow(2).mean()

    reference_backward(reference, mixed_loss, rows(0, 5))
    check_same(model, reference, what="gradients")
    assert model[0]._parameters["weight"].grad is None


@on_ranks(2)
def test_transformed_functions():
    model, reference, batch = sharded_mlp(), seeded(mlp), mine(rows(0, 5))
    gradients = [
        torch.func.grad(lambda given, module=module: functional_call(module, given, (batch,)).pow(2).mean())(others())
        for module in (model, reference)
    ]
    for name, gradient in gradients[1].items():
        assert torch.equal(gradients[0][name], gradient), name


@on_ranks(2)
def test_sharded_tensors():
    model, source, reference = sharded_mlp(), sharded_mlp(seed=7), seeded(mlp, 7)
    batch = mine(rows(0, 5))
    own = dict(model.named_parameters())
    assert torch.equal(functional_call(model, own, (batch,)), seeded(mlp)(batch)), "its own, so nothing is exchanged"
    average = {name: value.detach().clone() for name, value in source.named_parameters()}
    assert torch.equal(functional_call(model, average, (batch,)), reference(batch))
    average["0.weight"].requires_grad_()
    with pytest.raises(NotImplementedError, match="functional_call.*'weight'.*full_tensor"):
        functional_call(model, average, (batch,))
    assert torch.equal(model(batch), seeded(mlp)(batch))


@on_ranks(2)
def test_a_forward_with_summoned_parameters():
    model, reference, batch = sharded_mlp(), seeded(mlp), mine(rows(0, 5))
    with libfsdp.summon_full_params(model), torch.no_grad():
        model[0].weight.fill_(0.5)
        reference[0].weight.fill_(0.5)
        assert torch.equal(model(batch), reference(batch))
    assert torch.equal(model(batch), reference(batch))
    check_same(model, reference)
