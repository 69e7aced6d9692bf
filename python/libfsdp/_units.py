"""What modules hold before and after the engine makes a unit of their parameters."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from . import _C
from ._composable import applied_to
from ._registered import Registered, sharded_behind
from ._sharded import Sharded, local_of
from ._state import state_of

Slot = tuple[str, nn.Module, str, nn.Parameter]
"""A parameter's path, its module, its name there, and itself."""
View = tuple[str, list[tuple[str, torch.Tensor]], list[tuple[str, _C.Unit]], list[torch.Tensor]]
"""A module as the engine sees it: its name, its slots, the units below it, its buffers."""


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules from ``root`` down, except those that another composable API replicates."""
    replicated: set[nn.Module] = set()
    for path, module in root.named_modules():
        if "replicate" in applied_to(module):
            replicated.update(module.modules())
        if module not in replicated:
            yield path, module


def named_slots(root: nn.Module) -> Iterator[Slot]:
    for path, module in named_modules(root):
        registered = module._parameters
        for name, parameter in registered.slots() if isinstance(registered, Registered) else registered.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, module, name, parameter


def slots_to_shard(root: nn.Module, ignored: set[nn.Parameter]) -> list[Slot]:
    """Without what sharded modules below have left alone, unless it is a parameter of others too."""
    slots = [slot for slot in named_slots(root) if slot[3] not in ignored]
    decided = {module for child in root.modules() if state_of(child) for module in child.modules()}
    others = {parameter for _, owner, _, parameter in slots if owner not in decided}
    return [slot for slot in slots if slot[3] in others or _C.belongs_to_unit(local_of(slot[3]))]


def view_of(
    root: nn.Module,
    slots: list[Slot],
    tensors: Mapping[nn.Parameter, torch.Tensor],
    name_of: Callable[[str], str] = str,
) -> View:
    """``tensors``: what the engine is given of the parameters that it is to shard. ``name_of``: of a path."""
    given = [
        (name_of(path), tensors[parameter] if parameter in tensors else local_of(parameter))
        for path, _, _, parameter in slots
    ]
    below = [(name_of(path), state_of(child).unit) for path, child in named_modules(root) if state_of(child)]
    buffers = [buffer for _, child in named_modules(root) for buffer in child.buffers(recurse=False)]
    return type(root).__name__, given, below, buffers


def is_home(owner: nn.Module, name: str) -> bool:
    """Whether what is registered there is a sharded parameter that is shown there."""
    sharded = getattr(owner._parameters, "sharded", {}).get(name)
    return sharded is not None and owner._parameters[name] is sharded.parameter


def places_of(
    slots: list[list[Slot]],
    shards: list[list[torch.Tensor | None]],
    make: Callable[[torch.Tensor, nn.Parameter], Sharded],
) -> list[tuple[nn.Module, str, Sharded]]:
    """The places whose parameters the engine has sharded, each with what is to be shown there: what ``make`` makes of a
    shard and the parameter that it is of."""
    shown: dict[torch.Tensor, Sharded] = {}
    places = []
    for own, own_shards in zip(slots, shards, strict=True):
        for (_, owner, name, parameter), shard in zip(own, own_shards, strict=True):
            if shard is None or is_home(owner, name):
                continue  # left alone, or shown by an earlier call
            if shard not in shown:
                shown[shard] = make(shard, parameter)
            places.append((owner, name, shown[shard]))
    return places


def sharded_elsewhere(shard: torch.Tensor, parameter: nn.Parameter) -> Sharded:
    """Of a parameter that is tied to one of another unit."""
    sharded = sharded_behind(_C.handle_of(shard))
    if sharded is None:
        raise RuntimeError(
            f"fully_shard was given a parameter of shape {tuple(parameter.shape)} that an earlier call, which failed or "
            "whose module is gone, has sharded: build the model anew"
        )
    return sharded
