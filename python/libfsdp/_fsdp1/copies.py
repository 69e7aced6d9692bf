"""``copy.deepcopy`` of wrappers: a copy that is wrapped as the original is, made without communication of values.

Wrappers below are copied first, since what they wrap contains them. The copied modules get parameters of zeros, which are
sharded as the original ones were, and each rank's share of these is copied.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _C
from .flat import FlatState, Part, shown
from .ignored import Ignored
from .places import own_params
from .plain import PlainSharded
from .state import WrapperState

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel

Places = list[tuple[str, nn.Module, str, PlainSharded | Part]]


def copy_wrapped(wrapper: "FullyShardedDataParallel", memo: dict[int, Any]) -> tuple[nn.Module, Ignored]:
    """Of what is wrapped, and of what is ignored in it: not sharded but by the wrappers below."""
    wrapper._fsdp_state.follow()
    places = list(own_params(wrapper))
    for _, _, _, sharded in places:
        if id(sharded.handle) not in memo:  # it may be one of a wrapper below
            twin = _placeholder(sharded, wrapper.compute_device)
            memo[id(sharded.handle)] = twin
            if isinstance(sharded, PlainSharded):
                memo[id(sharded.parameter)] = twin
    with _unsharded(wrapper._fsdp_state, places, memo):
        module = copy.deepcopy(wrapper._fsdp_wrapped_module, memo)
    ignored = Ignored(
        {memo.get(id(each), each) for each in wrapper._ignored.modules},
        {memo.get(id(each), each) for each in wrapper._ignored.params},
    )
    return module, ignored


def _placeholder(sharded: PlainSharded | Part, device: torch.device) -> nn.Parameter:
    piece = sharded.piece
    zeros = torch.zeros(sharded.shape.numel(), dtype=piece.dtype, device=device)
    return nn.Parameter(zeros.as_strided(sharded.shape, sharded.stride), sharded.parameter.requires_grad)


@contextlib.contextmanager
def _unsharded(state: WrapperState, places: Places, memo: dict[int, Any]) -> Iterator[None]:
    """In the places of parameters are those of which ``memo`` knows what becomes of them."""
    if isinstance(state, FlatState):
        handles = {(owner, name): part.handle for _, owner, name, part in places}
        with shown(state, places, handles.get):
            yield
        return
    shadows = {(owner, name): owner.__dict__.pop(name) for _, owner, name, _ in places if name in owner.__dict__}
    try:
        yield
    finally:
        for (owner, name), shadow in shadows.items():
            owner.__dict__[name] = shadow


@torch.no_grad()
def copy_values(original: WrapperState, twin: WrapperState, memo: dict[int, Any]) -> None:
    """This rank's shares; and what the copies of optimizers, of the originals, are going to train."""
    if isinstance(original, FlatState):
        if original.flat is not None:
            twin.flat.parameter.copy_(original.flat.parameter)
            memo[id(original.flat.parameter)] = twin.flat.parameter
        return
    for (_, _, sharded), (_, _, other) in zip(original.sharded(), twin.sharded(), strict=True):
        other.parameter.copy_(sharded.parameter)
