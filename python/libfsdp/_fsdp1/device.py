"""On which device a wrapper's module computes, and how it comes there."""

import collections
import dataclasses
import warnings

import torch
import torch.distributed as dist
from collections.abc import Callable
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._registered import sharded_behind


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a unit's parameters are computed with."""

    device: torch.device


def managed_params(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    """That the wrapper is to shard."""
    return [each for each in module.parameters() if each not in ignored and sharded_behind(each) is None]


def compute_device(
    params: list[nn.Parameter], device_id: int | torch.device | None, device_mesh: DeviceMesh | None
) -> torch.device:
    """Where ``device_id`` or the mesh says, where the parameters are, or the current accelerator's; then the host."""
    devices = {param.device for param in params if not param.is_meta}
    on_host = torch.device("cpu")
    given = _explicit(device_id)
    if len(devices) == 2 and on_host in devices:
        if given is None:
            raise RuntimeError(
                "To support a module with both CPU and GPU params, please pass in device_id argument."
            )
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")
    moved = devices - {on_host}
    there = moved.pop() if moved else None
    if given is not None and there is not None and there != given:
        raise ValueError(f"Inconsistent compute device and `device_id` on rank {dist.get_rank()}: {there} vs {given}")
    if given is not None or there is not None:
        return given if given is not None else there
    if device_mesh is not None and device_mesh.device_type == "cpu":
        return on_host
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _current(accelerator.type) if accelerator else on_host


def _current(kind: str) -> torch.device:
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _explicit(device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    device = device_id if isinstance(device_id, torch.device) else torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        current = _current(device.type)
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {dist.get_rank()}, which does not have an explicit "
            f"index. FSDP will use the current device {current}. If this is incorrect, please explicitly call "
            f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
            "`device_id` argument.",
            stacklevel=4,
        )
        return current
    return device


def materialize(
    module: nn.Module,
    params: list[nn.Parameter],
    ignored: set[nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Gives values to what is on the meta device, ``param_init_fn``'s or those of each module's ``reset_parameters()``."""
    stop_at = ignored | {child for child in module.modules() if "_fsdp_state" in child.__dict__}
    modules = _from_above(module, stop_at)
    buffers = [buffer for child in modules for buffer in child.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in (*params, *buffers)):
        return
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
        for child in modules:
            param_init_fn(child)
        return
    for child in modules:
        if any(True for _ in (*child.parameters(recurse=False), *child.buffers(recurse=False))):
            _reset(child, device)


def _reset(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device, recurse=False)
    try:
        with torch.no_grad():
            module.reset_parameters()
    except BaseException as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that your "
            f"module of type {type(module)} implements a `reset_parameters()` method.",
            stacklevel=5,
        )
        raise


def _from_above(root: nn.Module, stop_at: set[nn.Module]) -> list[nn.Module]:
    found, queue, seen = [], collections.deque([root]), {root}
    while queue:
        module = queue.popleft()
        found.append(module)
        for child in module.children():
            if child not in seen and child not in stop_at:
                seen.add(child)
                queue.append(child)
    return found
