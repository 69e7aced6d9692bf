"""``state_dict()`` and ``load_state_dict()`` of wrappers: whole values under the names of the unwrapped model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .. import _C
from ._pytorch import FSDP_PREFIX
from .buffers import saved_dtype
from .flat import FlatState, PlaceOfPart, shown
from .places import own_buffers, own_params
from .state import instances_below

CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def set_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    kinds = CONFIGS[state_dict_type]
    configs = [state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]()]
    for kind, config, name in zip(kinds, configs, ("state_dict_config", "optim_state_dict_config"), strict=True):
        if type(config) is not kind:
            raise RuntimeError(f"Expected {name} of type {kind} but got {type(config)}")
    if state_dict_type is not StateDictType.FULL_STATE_DICT:
        raise NotImplementedError(
            f"libfsdp's FullyShardedDataParallel does not have {state_dict_type} yet: use StateDictType.FULL_STATE_DICT"
        )
    former = get_type(module)
    for instance in instances_below(module):
        instance._state_dict_settings = StateDictSettings(state_dict_type, *configs)
    return former


def get_type(module: nn.Module) -> StateDictSettings:
    settings = [instance._state_dict_settings for instance in instances_below(module)]
    if any(each != settings[0] for each in settings):
        raise AssertionError(f"All FSDP modules must have the same state dict settings, got {settings}")
    return settings[0] if settings else default_settings()


@contextlib.contextmanager
def type_for_a_while(module: nn.Module, *settings: Any) -> Iterator[None]:
    former = set_type(module, *settings)
    try:
        yield
    finally:
        set_type(module, former.state_dict_type, former.state_dict_config, former.optim_state_dict_config)


@contextlib.contextmanager
def own_names(wrapper: nn.Module) -> Iterator[None]:
    """Parameters that are hidden are registered under their own names, so that these are saved in their order."""
    state = wrapper._fsdp_state
    if not isinstance(state, FlatState) or wrapper._summoned:
        yield
        return
    places = list(own_params(wrapper))
    handles = {(owner, name): part.handle for _, owner, name, part in places}
    with shown(state, places, handles.get):
        yield


def install_hooks(wrapper: nn.Module) -> None:
    wrapper._register_state_dict_hook(_show_wholes)
    wrapper.register_load_state_dict_pre_hook(_take_parts)
    wrapper.register_load_state_dict_post_hook(_clean_keys)


@torch.no_grad()
def _show_wholes(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Puts whole parameters, copies, in the places of this rank's parts. Collective."""
    config = wrapper._state_dict_settings.state_dict_config
    for key in [key for key in state_dict if key.startswith(prefix + FSDP_PREFIX)]:
        state_dict[prefix + key.removeprefix(prefix + FSDP_PREFIX)] = state_dict.pop(key)
    wanted = not config.rank0_only or wrapper.rank == 0
    wholes: dict[Any, torch.Tensor] = {}
    for path, _, _, sharded in own_params(wrapper):
        if sharded not in wholes:
            wholes[sharded] = _C.full_tensor(sharded.piece) if not wrapper._summoned else sharded.handle.detach().clone()
            if not wanted:
                wholes[sharded] = torch.empty(0)
        if prefix + path in state_dict:
            state_dict[prefix + path] = wholes[sharded].cpu() if config.offload_to_cpu else wholes[sharded]
    for path, buffer in own_buffers(wrapper):
        if prefix + path in state_dict:
            value = state_dict[prefix + path].to(saved_dtype(buffer))
            state_dict[prefix + path] = value.cpu() if config.offload_to_cpu else value
    if not wanted:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]


def _take_parts(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Of whole values, what this rank has of the parameters."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + FSDP_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
    if wrapper._summoned:
        return
    state, places = wrapper._fsdp_state, list(own_params(wrapper))
    if isinstance(state, FlatState):
        _take_parts_of_others(state, places, state_dict, prefix + FSDP_PREFIX, *arguments)
        state.begin_loading(places)
        return
    for path, _, _, sharded in places:
        key = prefix + FSDP_PREFIX + path
        whole = state_dict.get(key)
        if isinstance(whole, torch.Tensor) and whole.shape == sharded.shape:
            state_dict[key] = _C.piece_of(sharded.handle, whole.detach())


@torch.no_grad()
def _take_parts_of_others(
    state: FlatState,
    places: list[PlaceOfPart],
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """Parameters that are tied to ones of another unit, which alone shows them."""
    for path, _, _, part in places:
        if part.flat is state.flat:
            continue
        whole = state_dict.pop(prefix + path, None)
        if whole is not None:
            part.piece.copy_(_C.piece_of(part.handle, whole.detach()))
        elif strict:
            missing_keys.append(prefix + path)


def end_loading(root: nn.Module) -> None:
    """Whatever an exception may have broken off."""
    for instance in instances_below(root):
        if isinstance(instance._fsdp_state, FlatState):
            instance._fsdp_state.end_loading()


def _clean_keys(wrapper: nn.Module, incompatible: Any) -> None:
    end_loading(wrapper)
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(FSDP_PREFIX, "") for key in keys]
