"""Whole parameters in the places of sharded ones, for a while."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import _C
from ._registered import Registered, sharded_behind
from ._sharded import local_of


@contextmanager
def summoned(
    places: list[tuple[str, nn.Module, str]],
    only: _C.Unit | None,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """``places``: a path, a module and the name of a sharded parameter there. ``only``: of this unit."""
    slots, shown = [], []
    given: dict[tuple[nn.Module, str], torch.Tensor] = {}
    for path, owner, name in places:
        registered = Registered.of(owner)
        if name in registered.hidden:
            raise NotImplementedError(
                f"libfsdp.summon_full_params does not show '{path}', which is part of a flat parameter: use "
                "FullyShardedDataParallel.summon_full_params(model)"
            )
        slots.append((path, local_of(registered[name]), functools.partial(_register_whole, given, owner, name)))
        shown.append((owner, name, registered.sharded[name]))
    wholes = _C.Summoned(slots, only, writeback, rank0_only, offload_to_cpu, with_grads)
    for owner, name, sharded in shown:
        sharded.show_handle_in(owner, name)
    try:
        yield
    finally:
        try:
            if writeback:
                take_assigned(given)
            wholes.end()
        finally:
            for owner, name, sharded in shown:
                sharded.show_handle_in(owner, name)
                sharded.enter(owner, name)


def _register_whole(given: dict[tuple[nn.Module, str], torch.Tensor], owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    registered = Registered.of(owner)
    tensor._is_param = True
    shown = registered.sharded[name].as_given(tensor)
    registered.exchange_quietly(name, shown)
    if shown is tensor:
        given[owner, name] = tensor


@torch.no_grad()
def take_assigned(wholes: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
    """What users have put in the places of wholes: perhaps another of these, or what shows it to modules' code."""
    assigned = []
    for (owner, name), whole in wholes.items():
        current = owner._parameters.get(name)
        if current is not None and current is not whole:
            sharded = sharded_behind(current)
            assigned.append((whole, (current if sharded is None else sharded.handle).detach().clone()))
    for whole, values in assigned:
        whole.data = values


@contextmanager
def exchanged(tensors: dict[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """These are registered in the places of others. What the modules' code reads stays."""
    former = {(owner, name): dict.get(owner._parameters, name) for owner, name in tensors}
    try:
        for (owner, name), tensor in tensors.items():
            Registered.of(owner).exchange_quietly(name, tensor)
        yield
    finally:
        for (owner, name), tensor in former.items():
            Registered.of(owner).exchange_quietly(name, tensor)
