"""Makes one flat unit of what a wrapper manages."""

import functools
import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from .. import _C
from .._registered import Registered, sharded_behind
from .._sharded import Sharded
from .._state import state_of
from .._units import Slot, places_of, sharded_elsewhere, slots_to_shard, view_of
from ._pytorch import clean_tensor_name, without_checkpoint
from .device import Place
from .flat import FLAT_NAME, FlatState, Part
from .groups import Groups
from .ignored import Ignored
from .places import own_modules
from .plain import Calls, PlainSharded, whole_of
from .state import WrapperState, engine_policy, instances_below, is_wrapper

ALIGNMENT = 16  # bytes of a multiple of which each parameter begins, as in PyTorch's flat parameter
KEEPS_WHOLE = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def make_unit(
    module: nn.Module, ignored: Ignored, options: _C.FullyShardOptions, device: torch.device, use_orig_params: bool
) -> WrapperState:
    slots = slots_to_shard(module, ignored.params)
    new: dict[nn.Parameter, str] = {}
    for path, _, _, parameter in slots:
        if sharded_behind(parameter) is None:
            new.setdefault(parameter, clean_tensor_name(path))
    _check_nothing_was_added_below(module, ignored, new)
    _check_flattenable(new, use_orig_params)
    refuse_optimizers_in_backward(new, use_orig_params)
    return (_shown_as_parts if use_orig_params else _shown_as_one)(module, slots, list(new), ignored, options, device)


def refuse_optimizers_in_backward(params: Iterable[nn.Parameter], use_orig_params: bool) -> None:
    """They would never run, and nothing would be trained."""
    if not any(hasattr(param, "_in_backward_optimizers") for param in params):
        return
    if not use_orig_params:
        raise RuntimeError(
            "_apply_optimizer_in_backward is only supported with use_orig_params=True, and by PyTorch's class: call "
            "optimizer.step() after backward()"
        )
    raise NotImplementedError(
        "libfsdp's FullyShardedDataParallel does not have _apply_optimizer_in_backward: call optimizer.step() after backward()"
    )


def _check_nothing_was_added_below(root: nn.Module, ignored: Ignored, new: Iterable[nn.Parameter]) -> None:
    """To what a wrapper has wrapped before: neither that nor this one would reduce its gradients. What stands in the place
    of a parameter of its own is that wrapper's affair."""
    fully_sharded = (each for each in root.modules() if state_of(each) and not is_wrapper(each))
    left_alone = ignored.modules.union(*(each.modules() for each in fully_sharded))
    known = ignored.params.union(new)
    for wrapper in instances_below(root):
        for path, module in own_modules(wrapper):
            own = (FLAT_NAME, *getattr(module._parameters, "sharded", ()))
            for name, parameter in module._parameters.items():
                is_new = parameter is not None and parameter.requires_grad and name not in own and parameter not in known
                if is_new and module not in left_alone and sharded_behind(parameter) is None:
                    raise NotImplementedError(
                        f"'{clean_tensor_name(path + name)}' was registered in a {type(wrapper.module).__name__} after "
                        "FullyShardedDataParallel had wrapped that, and would not be sharded: register it before that, or "
                        "pass it in ignored_states"
                    )


def _check_flattenable(params: dict[nn.Parameter, str], use_orig_params: bool) -> None:
    """``params``: with their paths."""
    for param, path in params.items():
        if param.ndim == 0:
            raise ValueError(f"FSDP doesn't support scalar parameters. Change {path} to a 1D tensor with numel equal to 1.")
        if isinstance(param, DTensor):
            raise NotImplementedError(
                "FullyShardedDataParallel does not take parameters that are DTensors yet, and "
                f"'{path}' is one: fully_shard does"
            )
        if not param.is_floating_point():
            raise ValueError("Cannot flatten integer dtype tensors")
    for first, other in itertools.pairwise(params):
        if other.dtype != first.dtype:
            raise ValueError(f"Must flatten tensors with uniform dtype but got {first.dtype} and {other.dtype}")
        if not use_orig_params and other.requires_grad != first.requires_grad:
            raise ValueError("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`")


def _shown_as_parts(
    module: nn.Module,
    slots: list[Slot],
    new: list[nn.Parameter],
    ignored: Ignored,
    options: _C.FullyShardOptions,
    device: torch.device,
) -> WrapperState:
    wholes = {parameter: whole_of(parameter) for parameter in new}
    unit, shards = _shard(module, slots, wholes, ignored, options, _C.FlatCut(ALIGNMENT, False))
    calls = Calls()
    state = WrapperState(unit, Place(device), calls)
    for owner, name, sharded in places_of([slots], shards, functools.partial(_sharded_for, wholes, calls)):
        state.add(owner, name, sharded)
    return state


def _shown_as_one(
    module: nn.Module,
    slots: list[Slot],
    new: list[nn.Parameter],
    ignored: Ignored,
    options: _C.FullyShardOptions,
    device: torch.device,
) -> FlatState:
    """The parameters themselves become the handles."""
    for parameter in new:
        parameter.grad = None
    unit, _ = _shard(module, slots, {}, ignored, options, _C.FlatCut(1, True))
    state = FlatState(unit, Place(device), Calls())
    flat = state.show_flat(without_checkpoint(module)) if new else None
    parts = {parameter: Part(parameter, flat) for parameter in new}
    for _, owner, name, parameter in slots:
        sharded = parts.get(parameter) or sharded_behind(parameter)
        if isinstance(sharded, Part) and Registered.of(owner).hidden.get(name) is not sharded:
            state.add(owner, name, sharded)
    return state


def _shard(
    module: nn.Module,
    slots: list[Slot],
    wholes: Mapping[nn.Parameter, torch.Tensor],
    ignored: Ignored,
    options: _C.FullyShardOptions,
    flat: _C.FlatCut,
) -> tuple[_C.Unit, list[list[torch.Tensor | None]]]:
    name, tensors, below, buffers = view_of(module, slots, wholes, clean_tensor_name)
    options.ignored_params = list(ignored.buffers)  # they are sent, and not moved
    return _C.shard_modules([(name, tensors, below, buffers)], options, flat)


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
