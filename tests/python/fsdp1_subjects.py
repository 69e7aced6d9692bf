"""What the tests of ``FullyShardedDataParallel`` share. Each behaviour is looked at beside PyTorch's own class, which runs on
a CPU if it is told that this is its device."""

import functools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import libfsdp
import on_gpus
from subjects import BATCH, mine, rows

FSDP = functools.partial(libfsdp.FullyShardedDataParallel, use_orig_params=True)
TORCH = functools.partial(
    torch_fsdp.FullyShardedDataParallel, use_orig_params=True, device_id=on_gpus.device()
)
BOTH = (FSDP, TORCH)


def quietly(function, *args, **kwargs):
    """Without PyTorch's words on strategies that are deprecated, or make no difference on one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def blocks():
    """Of odd sizes, with a frozen parameter and two that are tied, below the second of two blocks."""
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.LayerNorm(9)), nn.Linear(9, 3)
    )
    model[1][0].bias.requires_grad_(False)
    model[1][2].bias = model[1][3].bias
    return model


def wrapped(model, wrap, **options):
    """The second block, then all."""
    model[1] = quietly(wrap, model[1], **options)
    return quietly(wrap, model, **options)


def loss_of(model, batch):
    return model(batch).float().pow(2).mean()


def cleaned(name):
    return name.replace("_fsdp_wrapped_module.", "")


def summoned(model, **options):
    return type(model).summon_full_params(model, **options)


def wholes_of(model):
    """Parameters and gradients, whole, by name."""
    with summoned(model, with_grads=True, writeback=False):
        return {
            name: (parameter.detach().clone(), None if parameter.grad is None else parameter.grad.clone())
            for name, parameter in model.named_parameters()
        }


def check_same_gradient(ours, theirs, name=""):
    """PyTorch's parts without elements have none."""
    assert (ours.grad is None or ours.numel() == 0) if theirs.grad is None else ours.grad is not None, name
    if theirs.grad is not None:
        assert ours.grad.dtype == theirs.grad.dtype, name
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m: f"gradient of {name}: {m}")


def check_same(model, reference, exact):
    """Parameters and gradients are those of an unsharded model."""
    ours, tolerance = wholes_of(model), dict(rtol=0, atol=0) if exact else {}
    assert list(ours) == [name for name, _ in reference.named_parameters()]
    for name, parameter in reference.named_parameters():
        values, gradient = ours[name]
        torch.testing.assert_close(values, parameter.detach(), msg=lambda m: f"{name}: {m}", **tolerance)
        if parameter.grad is None:
            assert gradient is None or not gradient.any(), name
        else:
            torch.testing.assert_close(gradient, parameter.grad, msg=lambda m: f"gradient of {name}: {m}", **tolerance)


def reference_backward(model, batch, loss_of=loss_of):
    """Rank after rank, as the shared-memory group adds."""
    for part in batch.split(BATCH):
        loss_of(model, part).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())


def check_training(model, reference, exact, steps=3, optimizers=None, loss_of=loss_of, shape=(5,)):
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ours, theirs = optimizers or (make(model.parameters()), make(reference.parameters()))
    tolerance = dict(rtol=0, atol=0) if exact else {}
    for step in range(steps):
        batch = rows(step, *shape)
        loss = loss_of(model, mine(batch))
        torch.testing.assert_close(loss.detach(), loss_of(reference, mine(batch)).detach(), **tolerance)
        loss.backward()
        reference_backward(reference, batch, loss_of)
        check_same(model, reference, exact)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        check_same(model, reference, exact)
