"""What only libfsdp has."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _C
from ._registered import Registered, sharded_behind
from ._sharded import local_of, shard_of
from ._state import state_of, states_below
from ._summon import summoned, take_assigned
from ._units import named_slots


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
    same on every rank where plain parameters' gradients are. Takes a module or parameters, sharded and plain ones.
    Collective."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(isinstance(p, DTensor) and not _is_ours_alone(p) for p in parameters):
        return _clip_on_several_meshes(parameters, max_norm, float(norm_type), error_if_nonfinite)
    return _C.clip_grad_norm_([shard_of(p) for p in parameters], max_norm, float(norm_type), error_if_nonfinite)


def _is_ours_alone(parameter: torch.Tensor) -> bool:
    """Whether nothing but ``fully_shard`` has cut it."""
    sharded = sharded_behind(parameter)
    return sharded is not None and not (sharded.around and sharded.around.cuts)


def _clip_on_several_meshes(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """PyTorch's functions, which know tensor parallelism, on the parameters of one mesh at a time. A rank that has got no
    gradients of some, experts say, takes part with zeros."""
    parameters = list(dict.fromkeys(parameters))
    ours = [each for each in parameters if not isinstance(each, DTensor) and sharded_behind(each) is not None]
    known = set(ours)
    on_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in (each for each in parameters if each not in known):
        mesh = getattr(parameter, "device_mesh", None)
        others_may_have_one = mesh is not None and mesh.size() > 1 and parameter.requires_grad and norm_type > 0
        if parameter.grad is not None or others_may_have_one:
            on_mesh.setdefault(mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm(list(map(_gradient_or_zeros, own)), norm_type) for own in on_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if ours:  # FSDP1's, of which PyTorch's functions see this rank's pieces; so large a norm clips nothing
        norms.append(_C.clip_grad_norm_(ours, torch.finfo(torch.float32).max, norm_type, error_if_nonfinite))
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    for own in (*on_mesh.values(), ours):
        nn.utils.clip_grads_with_norm_(own, max_norm, total)
    return total


def _gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _units_around(module: nn.Module) -> list[_C.Unit]:
    """Those of a module and of the modules below, and those above that have parameters there."""
    registered = [each._parameters for each in module.modules() if isinstance(each._parameters, Registered)]
    above = [sharded.unit for each in registered for sharded in each.sharded.values()]
    return [state.unit for state in states_below(module)] + above


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
    """While it lasts, ``module.parameters()`` are whole, plain tensors, which may be read and written. What is
    assigned in their places is written back too. What was a DTensor before ``fully_shard`` is one as it was.

    Collective at its beginning and at its end. What users have registered in the places of parameters of the units
    from ``module`` on is taken over first. Not in a backward. Between a forward and its backward for reading: what is written then is a write to what
    the graph has saved.
    """
    state = state_of(module)
    _C.check_may_summon(_units_around(module) if recurse else [state.unit] if state else [], writeback)
    for each in states_below(module):
        if not each.intact():
            each.follow()
    places = [
        (path, owner, name)
        for path, owner, name, parameter in named_slots(module)
        if _C.belongs_to_unit(local_of(parameter)) and (recurse or state is not None)
    ]
    only = None if recurse or state is None else state.unit
    with ExitStack() as stack:
        wholes = stack.enter_context(summoned(places, only, writeback, rank0_only, offload_to_cpu, with_grads))
        if writeback:
            stack.callback(take_assigned, wholes)
        yield


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
