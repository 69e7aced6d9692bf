"""Makes one flat unit of what a wrapper manages."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from .. import _C
from .._registered import sharded_behind
from .._sharded import Sharded
from .._units import places_of, sharded_elsewhere, slots_to_shard, view_of
from ._pytorch import clean_tensor_name
from .device import Place
from .groups import Groups
from .ignored import Ignored
from .plain import Calls, PlainSharded, whole_of
from .state import WrapperState, engine_policy

ALIGNMENT = 16  # bytes of a multiple of which each parameter begins, as in PyTorch's flat parameter
KEEPS_WHOLE = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def make_unit(
    module: nn.Module, ignored: Ignored, options: _C.FullyShardOptions, device: torch.device
) -> WrapperState:
    slots = slots_to_shard(module, ignored.params)
    wholes = {
        parameter: whole_of(parameter, clean_tensor_name(path))
        for path, _, _, parameter in slots
        if sharded_behind(parameter) is None
    }
    name, tensors, below, buffers = view_of(module, slots, wholes, clean_tensor_name)
    left_alone = ignored.buffers
    buffers = [buffer for buffer in buffers if buffer not in left_alone]
    unit, shards = _C.shard_modules([(name, tensors, below, buffers)], options, ALIGNMENT)
    calls = Calls()
    state = WrapperState(unit, Place(device), calls)
    for owner, name, sharded in places_of([slots], shards, functools.partial(_sharded_for, wholes, calls)):
        state.add(owner, name, sharded)
    return state


def _sharded_for(
    wholes: dict[nn.Parameter, nn.Parameter], calls: Calls, shard: torch.Tensor, parameter: nn.Parameter
) -> Sharded:
    return PlainSharded(shard, parameter, calls) if parameter in wholes else sharded_elsewhere(shard, parameter)


def engine_options(
    groups: Groups,
    strategy: ShardingStrategy,
    device: torch.device,
    precision: MixedPrecision,
    offload: CPUOffload,
    sync_module_states: bool,
) -> _C.FullyShardOptions:
    policy = engine_policy(precision)
    options = _C.FullyShardOptions(groups.engine(strategy, device), False if strategy in KEEPS_WHOLE else None)
    options.set_precision(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    options.sync_module_states = sync_module_states
    if offload.offload_params:
        options.set_offload(True)
    return options
