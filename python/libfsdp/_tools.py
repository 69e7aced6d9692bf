"""What only libfsdp has."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import _C
from ._registered import Registered
from ._sharded import local_of
from ._state import state_of


def describe(module: nn.Module) -> _C.Description:
    """The units of a sharded module and the memory they need; ``print`` it for a table."""
    state = state_of(module)
    if state is None:
        raise ValueError(f"describe expects a module that fully_shard was called on, got {type(module)}")
    return _C.describe(state.unit)


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients so that the norm of all of them is at most ``max_norm``; returns that norm, a plain tensor, the
    same on every rank. Takes a module or parameters; sharded and plain ones may be mixed. Collective."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return _C.clip_grad_norm_([local_of(p) for p in parameters], max_norm, float(norm_type), error_if_nonfinite)


@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """While it lasts, ``module.parameters()`` are whole, plain tensors, which may be read and written.

    Collective at its beginning and at its end. Not between a forward and the end of its backward.
    """
    state = state_of(module)
    slots, replace = [], []
    registered = []
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            local = None if parameter is None else local_of(parameter)
            if local is not None and _C.belongs_to_unit(local) and (recurse or state is not None):
                slots.append((f"{path}.{name}" if path else name, local))
                replace.append(lambda tensor, owner=owner, name=name: _register_whole(owner, name, tensor))
                registered.append((owner, name, parameter))
    options = _C.SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    summoned = _C.Summoned(slots, replace, None if recurse else state.unit if state else None, options)
    try:
        yield
    finally:
        summoned.end()
        for owner, name, parameter in registered:
            Registered.of(owner).exchange_quietly(name, parameter)


def _register_whole(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    tensor._is_param = True
    Registered.of(owner).exchange_quietly(name, tensor)


@contextmanager
def trace(file: str | os.PathLike[str]) -> Iterator[None]:
    """While it lasts, what the engine does and waits for is recorded, for Perfetto, Chrome and ``fsdp-report``.

    The rank goes before the file's ending: ``trace.json`` becomes ``trace.rank0.json``. ``FSDP_TRACE=file`` records a
    whole run.
    """
    recording = _C.Trace(os.fspath(file))
    try:
        yield
    finally:
        recording.end()
