"""Which of PyTorch's composable APIs were applied to a module. ``fully_shard`` is one of them, for the others to see:
``replicate`` leaves sharded modules alone.
"""

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem


def applied_to(module: nn.Module) -> dict[str, RegistryItem]:
    return module.__dict__.get(REGISTRY_KEY, {})


def mark(module: nn.Module) -> None:
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def unmark(module: nn.Module) -> None:
    del applied_to(module)["fully_shard"]
