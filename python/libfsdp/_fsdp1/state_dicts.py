"""``state_dict()`` and ``load_state_dict()`` of wrappers: values by the unwrapped model's names, whole or in rows."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from .. import _C
from .._summon import Slot, exchanged
from ._pytorch import FSDP_PREFIX, clean_tensor_name
from .buffers import saved_dtype
from .flat import FlatState, Part, shown
from .local_state import show_local, take_local
from .places import own_buffers, own_modules, own_params
from .plain import PlainSharded
from .sharded_values import rows_of, whole_of
from .state import instances_below
from .state_dict_types import check_settings, settings_in_use
from .summon import wholes_of


@contextlib.contextmanager
def wholes_in_places(wrapper: nn.Module) -> Iterator[None]:
    """What modules save, and what hooks of theirs see, is whole and under its own name: copies, which are what is saved.
    Collective."""
    if not wrapper._summoned:
        wrapper._fsdp_state.heed()
    if _is_in(wrapper, StateDictType.LOCAL_STATE_DICT):
        yield
        return
    state = wrapper._fsdp_state
    are_hidden = isinstance(state, FlatState) and not wrapper._summoned
    places = [place for place in own_params(wrapper) if are_hidden or place[1]._parameters.get(place[2]) is not None]
    if wrapper._summoned:
        at = _copies(wrapper, places)
    else:
        wholes = _wholes(wrapper, [sharded for _, _, _, sharded in places])
        at = {(owner, name): wholes[sharded] for _, owner, name, sharded in places}
    with shown(state, places, at.get) if are_hidden else exchanged(at):
        yield


def install_hooks(wrapper: nn.Module) -> None:
    wrapper._register_state_dict_hook(_show_values)
    wrapper.register_load_state_dict_pre_hook(_begin_loading)
    wrapper.register_load_state_dict_post_hook(_clean_keys)


@torch.no_grad()
def _show_values(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Of what modules and their hooks have saved: by names of the unwrapped model, and in rows if these are asked for."""
    settings = check_settings(wrapper)
    config = settings.state_dict_config
    for key in [key for key in state_dict if key.startswith(prefix + FSDP_PREFIX)]:
        state_dict[prefix + key.removeprefix(prefix + FSDP_PREFIX)] = state_dict.pop(key)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        show_local(wrapper, state_dict, prefix, config.offload_to_cpu)
        return
    in_rows = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    if not in_rows and config.rank0_only and wrapper.rank != 0:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
        return
    given: dict[PlainSharded | Part, tuple[torch.Tensor, torch.Tensor]] = {}  # as saved, and in the form that is asked for
    for path, _, _, sharded in own_params(wrapper):
        value = state_dict.get(prefix + path)
        if isinstance(value, torch.Tensor):
            if sharded not in given or not given[sharded][0].is_set_to(value):  # else it is tied
                given[sharded] = value, _in_form(value.detach(), wrapper, in_rows, config.offload_to_cpu)
            state_dict[prefix + path] = given[sharded][1]
    for path, buffer in own_buffers(wrapper):
        value = state_dict.get(prefix + path)
        if isinstance(value, torch.Tensor):
            value = value.to(saved_dtype(buffer)) if value.dtype == buffer.dtype else value
            state_dict[prefix + path] = value.cpu() if config.offload_to_cpu else value


def _in_form(value: torch.Tensor, wrapper: nn.Module, in_rows: bool, offload_to_cpu: bool) -> torch.Tensor:
    if in_rows:
        return rows_of(value, wrapper, offload_to_cpu)
    return value.cpu() if offload_to_cpu else value


def _is_in(wrapper: nn.Module, state_dict_type: StateDictType) -> bool:
    return settings_in_use(wrapper).state_dict_type is state_dict_type


def _wholes(
    wrapper: nn.Module, sharded: Iterable[PlainSharded | Part]
) -> dict[PlainSharded | Part, torch.Tensor]:
    """Copies, as parameters. Collective."""
    own = list(dict.fromkeys(sharded))
    wholes = _C.full_tensors([(each.handle, None) for each in own], _device_of_copies(wrapper))
    return {each: nn.Parameter(whole, each.handle.requires_grad) for each, whole in zip(own, wholes, strict=True)}


def _copies(
    wrapper: nn.Module, places: Iterable[tuple[str, nn.Module, str, PlainSharded | Part]]
) -> dict[Slot, torch.Tensor]:
    """Of what a guard shows there, or users have assigned; on a rank to which it shows nothing, of its part. Collective."""
    device, in_rows = _device_of_copies(wrapper), _is_in(wrapper, StateDictType.SHARDED_STATE_DICT)
    places = [(path, _seen_at(owner, name, sharded), owner, name, sharded) for path, owner, name, sharded in places]
    not_shown = [each for _, tensor, _, _, each in places if tensor is each.parameter and not _C.is_summoned(each.unit)]
    gathered = _wholes(wrapper, not_shown)  # of wrappers that no guard shows, to whose parameters some are tied
    copies: dict[int, torch.Tensor] = {}  # tied ones share theirs
    at = {}
    for path, tensor, owner, name, sharded in places:
        tensor = gathered.get(sharded, tensor)
        if in_rows and tensor.shape != sharded.handle.shape:
            raise ValueError(
                f"SHARDED_STATE_DICT has rows of whole parameters, and '{path}' has shape {tuple(tensor.shape)} here instead of "
                f"{tuple(sharded.handle.shape)}, as within summon_full_params(rank0_only=True): take it outside"
            )
        if id(tensor) not in copies:
            copies[id(tensor)] = nn.Parameter(tensor.detach().to(device, copy=True), tensor.requires_grad)
        at[owner, name] = copies[id(tensor)]
    return at


def _seen_at(owner: nn.Module, name: str, sharded: PlainSharded | Part) -> torch.Tensor:
    """In this place; or in another one of the same parameter, where that is tied to one of another wrapper."""
    here = owner._parameters[name]
    if here is not sharded.parameter:
        return here
    others = [module._parameters.get(at) for reference, at in sharded.places if (module := reference()) is not None]
    return next((other for other in others if other is not None and other is not here), here)


def _device_of_copies(wrapper: nn.Module) -> torch.device:
    on_host = settings_in_use(wrapper).state_dict_config.offload_to_cpu
    on_host = on_host and not _is_in(wrapper, StateDictType.SHARDED_STATE_DICT)
    return torch.device("cpu") if on_host else wrapper.compute_device


def _begin_loading(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Until the end, modules and their hooks find whole parameters, and whole values in place of rows. Collective."""
    settings = check_settings(wrapper)
    if not wrapper._summoned:
        wrapper._fsdp_state.heed()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + FSDP_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
    prefix += FSDP_PREFIX
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        take_local(wrapper, state_dict, prefix)
        return
    modules = {clean_tensor_name(path): module for path, module in own_modules(wrapper)}
    for key, value in state_dict.items():
        path, _, name = key.rpartition(".")
        owner = modules.get(f"{path}."[len(prefix) :]) if key.startswith(prefix) else None
        if owner is not None and isinstance(value, torch.Tensor) and not _is_dtensor_of_users(owner, name):
            state_dict[key] = whole_of(value, wrapper)
    if not wrapper._summoned:
        wrapper._fsdp_state.begin_loading(wholes_of(wrapper, writeback=True))
        _take_parts_of_others(wrapper, state_dict, prefix, *arguments)


def _is_dtensor_of_users(owner: nn.Module, name: str) -> bool:
    """That the wrapper was told to ignore: it is loaded as it is saved."""
    return isinstance(owner._parameters.get(name), DTensor) or isinstance(owner._buffers.get(name), DTensor)


@torch.no_grad()
def _take_parts_of_others(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """Of parameters that are tied to ones of another unit, which alone shows them whole."""
    for path, owner, name, sharded in own_params(wrapper):
        shown_here, whole = owner._parameters.get(name), state_dict.get(prefix + path)
        if shown_here is sharded.parameter:  # this rank's part
            if isinstance(whole, torch.Tensor) and whole.shape == sharded.shape:
                state_dict[prefix + path] = _C.piece_of(sharded.handle, whole.detach())
        elif shown_here is None and whole is not None:
            sharded.piece.copy_(_C.piece_of(sharded.handle, state_dict.pop(prefix + path).detach()))
        elif shown_here is None and strict:
            missing_keys.append(prefix + path)


def end_loading(root: nn.Module) -> None:
    """Whatever an exception may have broken off."""
    for instance in instances_below(root):
        instance._fsdp_state.end_loading()


def _clean_keys(wrapper: nn.Module, incompatible: Any) -> None:
    end_loading(wrapper)
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(FSDP_PREFIX, "") for key in keys]
