"""``copy.deepcopy`` of a sharded module: a sharded copy, made without communication of values.

The copy is made with placeholders on the meta device, sharded as the original was, and given copies of its shards.
"""

import copy
from typing import Any

import torch
from torch import nn

from . import _C
from ._composable import mark, unmark
from ._registered import Registered, sharded_behind
from ._sharded import Sharded
from ._state import FSDPState, state_of, states_below


@torch.inference_mode(False)  # what is made here may be trained
def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    states = states_below(module)
    for state in states:
        state.follow()
    inside = set(module.modules())  # of units that are lists of modules, some may lie elsewhere
    places = [place for state in states for place in state.sharded() if place[0] in inside]
    sharded = list({id(each): each for _, _, each in places}.values())
    copied = {}  # by an optimizer's copy, for example, which is going to train the twin then
    for each in sharded:
        if each.is_extended:
            raise TypeError(
                f"copy.deepcopy of a sharded module with a {type(each.parameter.to_local()).__name__} parameter is not "
                "supported: build the copy as the original was built, and load its state_dict()"
            )
        known = memo.get(id(each.parameter))
        if sharded_behind(known) is None:  # else a module copied before has it too
            copied[each] = known
            memo[id(each.parameter)] = memo[id(each.handle)] = memo[id(each.shadow)] = each.unsharded_on_meta()
    twin = _copy_unsharded(module, memo)
    pairs = dict(zip(module.modules(), twin.modules(), strict=True))
    stand_ins = {memo[id(each.parameter)] for each in copied}
    for state in _inner_first(states, module):
        _shard_alike(state, [pairs[each] for each in module.modules() if state_of(each) is state], stand_ins)
    for owner, name, each in places:
        if each in copied:
            _copy_values(each, pairs[owner], name, copied.pop(each))
            twins = Registered.of(pairs[owner]).sharded[name]
            for part in ("parameter", "handle", "shadow"):
                memo[id(getattr(each, part))] = getattr(twins, part)
    for each in pairs.values():
        if (state := state_of(each)) is not None:
            state.follow(each)
    return twin


def _inner_first(states: list[FSDPState], module: nn.Module) -> list[FSDPState]:
    """Units that were made below ones that had been there before them too."""
    ordered: dict[FSDPState, None] = {}
    seen = set()

    def visit(state: FSDPState) -> None:
        if state not in seen:
            seen.add(state)
            for each in (each for each in module.modules() if state_of(each) is state):
                for inner in states_below(each):
                    visit(inner)
            ordered[state] = None

    for state in states:
        visit(state)
    return list(ordered)


def _copy_unsharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which no module is sharded and parameters are what ``memo`` says."""
    originals = [each for each in module.modules() if state_of(each) is not None]
    shadows = {}
    for each in module.modules():
        names = [name for name in each._parameters if name in each.__dict__]
        shadows[each] = {name: each.__dict__.pop(name) for name in names}
    states = {each: (type(each), each.__dict__.pop("_fsdp_state")) for each in originals}
    try:
        for each in originals:
            each.__class__ = states[each][0]._original_class
            unmark(each)
        return copy.deepcopy(module, memo)
    finally:
        for each, (sharded_type, state) in states.items():
            each.__class__ = sharded_type
            each.__dict__["_fsdp_state"] = state
            mark(each)
        for each, names in shadows.items():
            each.__dict__.update(names)


def _shard_alike(state: FSDPState, modules: list[nn.Module], stand_ins: set[nn.Parameter]) -> None:
    from ._fully_shard import fully_shard

    parameters = {parameter for each in modules for parameter in each.parameters()}
    alone = {each for each in parameters - stand_ins if sharded_behind(each) is None}
    fully_shard(modules, ignored_params=alone, **state.arguments)
    _C.copy_settings(state.unit, state_of(modules[0]).unit)
    for setter, arguments in state.collective_settings.items():
        getattr(modules[0], setter)(**arguments)


def _copy_values(sharded: Sharded, twin: nn.Module, name: str, copied: nn.Parameter | None) -> None:
    original = sharded.parameter
    if not original.is_meta:
        setattr(twin, name, nn.Parameter(original.detach().clone(), original.requires_grad) if copied is None else copied)
        Registered.of(twin).sharded[name].follow(twin, name)
