"""``state_dict()`` and ``load_state_dict()`` of wrappers: values by the unwrapped model's names, whole or in rows."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from .. import _C
from ._pytorch import FSDP_PREFIX
from .buffers import saved_dtype
from .flat import FlatState, Part, PlaceOfPart, shown
from .local_state import show_local, take_local
from .places import own_buffers, own_params
from .plain import PlainSharded
from .sharded_values import rows_of, whole_of
from .state import instances_below
from .state_dict_types import settings_in_use


@contextlib.contextmanager
def own_names(wrapper: nn.Module) -> Iterator[None]:
    """Parameters that are hidden are registered under their own names, so that these are saved in their order."""
    state = wrapper._fsdp_state
    if not wrapper._summoned:
        state.heed()
    if not isinstance(state, FlatState) or wrapper._summoned or _is_local(wrapper):
        yield
        return
    places = list(own_params(wrapper))
    handles = {(owner, name): part.handle for _, owner, name, part in places}
    with shown(state, places, handles.get):
        yield


def install_hooks(wrapper: nn.Module) -> None:
    wrapper._register_state_dict_hook(_show_values)
    wrapper.register_load_state_dict_pre_hook(_take_parts)
    wrapper.register_load_state_dict_post_hook(_clean_keys)


@torch.no_grad()
def _show_values(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Puts copies of whole parameters, or this rank's rows of them, in the places of its parts. Collective."""
    settings = settings_in_use(wrapper)
    config, in_rows = settings.state_dict_config, settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    for key in [key for key in state_dict if key.startswith(prefix + FSDP_PREFIX)]:
        state_dict[prefix + key.removeprefix(prefix + FSDP_PREFIX)] = state_dict.pop(key)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        show_local(wrapper, state_dict, prefix, config.offload_to_cpu)
        return
    values = _wholes(wrapper, config.offload_to_cpu and not in_rows)
    if not in_rows and config.rank0_only and wrapper.rank != 0:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
        return
    if in_rows:
        values = {sharded: rows_of(whole, wrapper, config.offload_to_cpu) for sharded, whole in values.items()}
    for path, _, _, sharded in own_params(wrapper):
        if prefix + path in state_dict:
            state_dict[prefix + path] = values[sharded]
    for path, buffer in own_buffers(wrapper):
        if prefix + path in state_dict:
            value = state_dict[prefix + path].to(saved_dtype(buffer))
            state_dict[prefix + path] = value.cpu() if config.offload_to_cpu else value


def _is_local(wrapper: nn.Module) -> bool:
    is_cut = wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD
    return is_cut and wrapper._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT


def _wholes(wrapper: nn.Module, on_host: bool) -> dict[PlainSharded | Part, torch.Tensor]:
    own = list(dict.fromkeys(sharded for _, _, _, sharded in own_params(wrapper)))
    device = torch.device("cpu") if on_host else wrapper.compute_device
    if wrapper._summoned:
        return {sharded: sharded.handle.detach().to(device, copy=True) for sharded in own}
    return dict(zip(own, _C.full_tensors([(sharded.handle, None) for sharded in own], device), strict=True))


def _take_parts(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Of whole values, or of rows, what this rank has of the parameters. Collective for rows."""
    settings = settings_in_use(wrapper)
    if not wrapper._summoned:
        wrapper._fsdp_state.heed()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + FSDP_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        take_local(wrapper, state_dict, prefix + FSDP_PREFIX)
        return
    state, places = wrapper._fsdp_state, list(own_params(wrapper))
    for key in (prefix + FSDP_PREFIX + path for path, *_ in places):
        if isinstance(state_dict.get(key), torch.Tensor):
            state_dict[key] = whole_of(state_dict[key], wrapper)
    if wrapper._summoned:
        return
    if isinstance(state, FlatState):
        _take_parts_of_others(state, places, state_dict, prefix + FSDP_PREFIX, *arguments)
        state.begin_loading(places)
        return
    for path, _, _, sharded in places:
        key = prefix + FSDP_PREFIX + path
        whole = state_dict.get(key)
        if isinstance(whole, torch.Tensor) and whole.shape == sharded.shape:
            state_dict[key] = _C.piece_of(sharded.handle, whole)


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
