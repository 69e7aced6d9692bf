"""What the clients' scripts share. Each marks its cases: functions that train on two ranks and return an ``Outcome``."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

CASES: dict[str, Callable[[], "Outcome"]] = {}
STEPS = 4


def case(function: Callable[[], "Outcome"]) -> Callable[[], "Outcome"]:
    CASES[function.__name__] = function
    return function


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, torch.Tensor]


def shard(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> nn.Module:
    """By the ``fully_shard`` that PyTorch's name stands for: PyTorch's own, or libfsdp's."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def lists_of(model: nn.Module) -> list[nn.Module]:
    """What is in the model's ModuleLists, the innermost first."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for each in reversed(lists) for block in each]


def draws(step: int) -> torch.Generator:
    """Of this rank's batch at a step."""
    return torch.Generator().manual_seed(1000 * step + dist.get_rank())


def train(
    model: nn.Module,
    loss_at: Callable[[int], torch.Tensor],
    optimizer: Any = None,
    clip: float = 1.0,
    weights_of: Callable[[nn.Module], dict[str, torch.Tensor]] | None = None,
) -> Outcome:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_at(step)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, (weights_of or whole_weights)(model))


def train_on_images(model: nn.Module, blocks: Iterable[nn.Module], size: int) -> Outcome:
    shard(model.train(), blocks)

    def loss_at(step: int) -> torch.Tensor:
        images = torch.randn(4, 3, size, size, generator=draws(step))
        return nn.functional.cross_entropy(model(images), torch.arange(4) % 3)

    return train(model, loss_at)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.get_original_weight() if hasattr(tensor, "get_original_weight") else tensor.clone()  # torchao's NF4


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Also under the names of tied ones, and buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: whole(tensor) for name, tensor in named}
