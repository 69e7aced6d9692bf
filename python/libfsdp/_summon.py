"""Whole parameters in the places of sharded ones, for a while."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from . import _C
from ._registered import Registered, sharded_behind
from ._sharded import Sharded, local_of

Slot = tuple[nn.Module, str]


class Whole(NamedTuple):
    """What is shown in a slot, for which parameter: users may tie the slot to another one meanwhile."""

    tensor: torch.Tensor
    plain: torch.Tensor  # itself, or what a DTensor is around: the engine shows it
    sharded: Sharded


@contextmanager
def summoned(
    places: list[tuple[str, nn.Module, str]],
    only: _C.Unit | None,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[dict[Slot, Whole]]:
    """``places``: a path, a module and the name of a sharded parameter there. ``only``: of this unit. What users assign
    there is taken by who makes the guard, before it ends and before others of the same wholes do."""
    slots, shown = [], []
    given: dict[Slot, Whole] = {}
    for path, owner, name in places:
        registered = Registered.of(owner)
        if name in registered.hidden:
            raise NotImplementedError(
                f"libfsdp.summon_full_params does not show '{path}', which is part of a flat parameter: use "
                "FullyShardedDataParallel.summon_full_params(model)"
            )
        former = registered[name]
        # The second: of a module that nobody has sharded, and whose parameter is tied to a sharded one.
        sharded = registered.sharded.get(name) or sharded_behind(local_of(former))
        slots.append((path, local_of(former), functools.partial(_register_whole, given, owner, name, sharded)))
        shown.append((owner, name, sharded, former))
    wholes = _C.Summoned(slots, only, writeback, rank0_only, offload_to_cpu, with_grads)
    for owner, name, sharded, _ in shown:
        sharded.show_handle_in(owner, name)
    try:
        yield given
    finally:
        try:
            try:
                _take_flags(given)
                if writeback and with_grads:
                    _take_gradients(given)
            finally:
                wholes.end()
        finally:
            for owner, name, sharded, former in shown:
                sharded.show_handle_in(owner, name)
                if sharded.is_at(owner, name):
                    sharded.enter(owner, name)
                else:
                    Registered.of(owner).exchange_quietly(name, former)


def _register_whole(
    given: dict[Slot, Whole], owner: nn.Module, name: str, sharded: Sharded, tensor: torch.Tensor
) -> None:
    tensor._is_param = True
    shown = sharded.as_given(tensor)
    Registered.of(owner).exchange_quietly(name, shown)
    given[owner, name] = Whole(shown, tensor, sharded)


def _take_flags(wholes: dict[Slot, Whole]) -> None:
    """The engine knows what a DTensor is around."""
    for whole in wholes.values():
        if whole.tensor is not whole.plain and whole.tensor.is_leaf:
            whole.plain.requires_grad_(whole.tensor.requires_grad)


def _take_gradients(wholes: dict[Slot, Whole]) -> None:
    """Of what is shown as a DTensor, users change the DTensor's."""
    for (_, name), whole in wholes.items():
        if whole.tensor is not whole.plain:
            gradient = whole.tensor.grad
            whole.plain.grad = None if gradient is None else whole.sharded.plain_of(gradient, name)


@torch.no_grad()
def take_assigned(wholes: dict[Slot, Whole]) -> None:
    """What users have put in the places of wholes: their own, or another of these, as it is or as modules' code reads it."""
    shown = {id(whole.sharded): whole.plain for whole in wholes.values()}
    assigned = []
    for (owner, name), whole in wholes.items():
        current = owner._parameters.get(name)
        if current is None or current is whole.tensor:
            continue
        sharded = sharded_behind(current)
        given = whole.sharded.plain_of(current, name) if sharded is None else shown.get(id(sharded))
        if given is None:
            raise ValueError(
                f"summon_full_params: '{name}' was given a sharded parameter that is not shown whole here: give it a plain one "
                "with its values, which its full_tensor() has"
            )
        data = given.detach()
        assigned.append((whole.plain, data.clone() if _C.belongs_to_unit(data) else data))
    for tensor, data in assigned:
        tensor.data = data


@contextmanager
def exchanged(tensors: dict[Slot, torch.Tensor]) -> Iterator[None]:
    """These are registered in the places of others. What the modules' code reads stays."""
    former = {(owner, name): dict.get(owner._parameters, name) for owner, name in tensors}
    try:
        for (owner, name), tensor in tensors.items():
            Registered.of(owner).exchange_quietly(name, tensor)
        yield
    finally:
        for (owner, name), tensor in former.items():
            Registered.of(owner).exchange_quietly(name, tensor)
