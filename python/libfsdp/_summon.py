"""Whole parameters in the places of sharded ones, for a while."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import _C
from ._registered import Registered
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
    for path, owner, name in places:
        registered = Registered.of(owner)
        if name in registered.hidden:
            raise NotImplementedError(
                f"libfsdp.summon_full_params does not show '{path}', which is part of a flat parameter: use "
                "FullyShardedDataParallel.summon_full_params(model)"
            )
        slots.append((path, local_of(registered[name]), functools.partial(_register_whole, owner, name)))
        shown.append((owner, name, registered.sharded[name]))
    wholes = _C.Summoned(slots, only, writeback, rank0_only, offload_to_cpu, with_grads)
    for owner, name, sharded in shown:
        sharded.show_handle_in(owner, name)
    try:
        yield
    finally:
        try:
            wholes.end()
        finally:
            for owner, name, sharded in shown:
                sharded.show_handle_in(owner, name)
                sharded.enter(owner, name)


def _register_whole(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    registered = Registered.of(owner)
    tensor._is_param = True
    registered.exchange_quietly(name, registered.sharded[name].as_given(tensor))
