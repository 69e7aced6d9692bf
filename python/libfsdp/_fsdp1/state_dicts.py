"""``state_dict()`` and ``load_state_dict()`` of wrappers: values under the names of the unwrapped model, whole or in rows."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings, StateDictType

from .. import _C
from ._pytorch import FSDP_PREFIX
from .buffers import saved_dtype
from .places import own_buffers, own_params
from .plain import PlainSharded
from .sharded_values import rows_of, whole_of
from .state_dict_types import settings_in_use


def install_hooks(wrapper: nn.Module) -> None:
    wrapper._register_state_dict_hook(_show_values)
    wrapper.register_load_state_dict_pre_hook(_take_parts)
    wrapper.register_load_state_dict_post_hook(_clean_keys)


@torch.no_grad()
def _show_values(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Puts copies of whole parameters, or this rank's rows of them, in the places of its parts. Collective."""
    settings = _settings_of(wrapper)
    config, in_rows = settings.state_dict_config, settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    for key in [key for key in state_dict if key.startswith(prefix + FSDP_PREFIX)]:
        state_dict[prefix + key.removeprefix(prefix + FSDP_PREFIX)] = state_dict.pop(key)
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


def _settings_of(wrapper: nn.Module) -> StateDictSettings:
    settings = settings_in_use(wrapper)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "``local_state_dict`` can only be used when parameters are flatten and sharded: wrap with use_orig_params=False, "
            "or use StateDictType.SHARDED_STATE_DICT"
        )
    return settings


def _wholes(wrapper: nn.Module, on_host: bool) -> dict[PlainSharded, torch.Tensor]:
    own = list(dict.fromkeys(sharded for _, _, _, sharded in own_params(wrapper)))
    device = torch.device("cpu") if on_host else wrapper.compute_device
    if wrapper._summoned:
        return {sharded: sharded.handle.detach().to(device, copy=True) for sharded in own}
    return dict(zip(own, _C.full_tensors([(sharded.handle, None) for sharded in own], device), strict=True))


def _take_parts(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of whole values, or of rows, what this rank has of the parameters. Collective for rows."""
    _settings_of(wrapper)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + FSDP_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
    for path, _, _, sharded in own_params(wrapper):
        key = prefix + FSDP_PREFIX + path
        if not isinstance(state_dict.get(key), torch.Tensor):
            continue
        whole = whole_of(state_dict[key], wrapper)
        fits = whole.shape == sharded.shape and not wrapper._summoned
        state_dict[key] = _C.piece_of(sharded.handle, whole) if fits else whole


def _clean_keys(_wrapper: nn.Module, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(FSDP_PREFIX, "") for key in keys]
