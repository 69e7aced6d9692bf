"""Which kind of state dicts wrappers give: ``set_state_dict_type`` and what belongs to it."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .state import instances_below

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel

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
    former = _common_settings(module)
    for instance in instances_below(module):
        instance._state_dict_settings = StateDictSettings(state_dict_type, *configs)
    return former


def get_type(module: nn.Module) -> StateDictSettings:
    for instance in instances_below(module):
        _note_mesh(instance, instance._state_dict_settings.optim_state_dict_config)
    return _common_settings(module)


def _common_settings(module: nn.Module) -> StateDictSettings:
    settings = [instance._state_dict_settings for instance in instances_below(module)]
    if any(each != settings[0] for each in settings):
        raise AssertionError(f"All FSDP modules must have the same state dict settings, got {settings}")
    return settings[0] if settings else default_settings()


def _note_mesh(instance: "FullyShardedDataParallel", config: StateDictConfig | OptimStateDictConfig) -> None:
    if instance._device_mesh is None:
        return
    if instance._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            "state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict."
        )
    config._use_dtensor = True


@contextlib.contextmanager
def type_for_a_while(module: nn.Module, *settings: Any) -> Iterator[None]:
    former = set_type(module, *settings)
    try:
        yield
    finally:
        set_type(module, former.state_dict_type, former.state_dict_config, former.optim_state_dict_config)


def settings_in_use(instance: "FullyShardedDataParallel") -> StateDictSettings:
    """What a state dict of this wrapper goes by."""
    is_cut = instance.sharding_strategy is not ShardingStrategy.NO_SHARD
    return instance._state_dict_settings if is_cut else default_settings()


def check_settings(instance: "FullyShardedDataParallel") -> StateDictSettings:
    """Those in use, once for each state dict."""
    if instance.sharding_strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=5
        )
    else:
        _note_mesh(instance, instance._state_dict_settings.state_dict_config)
    return settings_in_use(instance)
