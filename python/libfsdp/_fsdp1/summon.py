"""Whole parameters in the wrappers below a module, for a while."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from .. import _C
from .._summon import Slot, Whole, summoned, take_assigned
from . import flat
from ._pytorch import TrainingState
from .flat import FlatState
from .places import own_params
from .state import instances_below, is_wrapper

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel


@contextlib.contextmanager
def summon(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    instances = instances_below(module) if recurse else [module] if is_wrapper(module) else []
    wholes: dict[Slot, Whole] = {}  # of all: users may exchange them
    with contextlib.ExitStack() as stack:
        for instance in instances:
            _check(instance, writeback, rank0_only, offload_to_cpu, with_grads)
            own = _summon_own(instance, writeback, rank0_only, offload_to_cpu, with_grads)
            wholes.update(stack.enter_context(own))
        stack.callback(take_assigned, wholes)
        yield


@contextlib.contextmanager
def _summon_own(
    instance: "FullyShardedDataParallel",
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[dict[Slot, Whole]]:
    """Shows which whole parameters are written back."""
    state = instance._fsdp_state
    state.heed()
    is_copied = instance.cpu_offload.offload_params and instance.compute_device.type != "cpu"  # from the host to the device
    shows_itself = instance.sharding_strategy is ShardingStrategy.NO_SHARD and not is_copied
    writeback = (writeback or (shows_itself and not offload_to_cpu)) and not rank0_only
    given = _give_empty_gradients(instance) if with_grads else []
    with contextlib.ExitStack() as guard:
        try:
            wholes = guard.enter_context(wholes_of(instance, writeback, rank0_only, offload_to_cpu, with_grads))
        finally:
            for part in given:
                part.grad = None
        instance._summoned = True
        try:
            yield wholes if writeback else {}
        finally:
            instance._summoned = False


def wholes_of(
    instance: "FullyShardedDataParallel",
    writeback: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> contextlib.AbstractContextManager[dict[Slot, Whole]]:
    """In the places of its own parameters, on the ranks that are to have them. What users assign there: as in
    ``summoned``."""
    state = instance._fsdp_state
    _C.check_may_summon([state.unit], writeback)
    if isinstance(state, FlatState):
        return flat.summoned(state, list(own_params(instance)), writeback, rank0_only, offload_to_cpu)
    places = [(path, owner, name) for path, owner, name, _ in own_params(instance)]
    return summoned(places, state.unit, writeback, rank0_only, offload_to_cpu, with_grads)


def _give_empty_gradients(instance: "FullyShardedDataParallel") -> list[nn.Parameter]:
    """Zeros, to this rank's parts that have none, where other ranks are about to gather gradients of theirs."""
    parts = list(dict.fromkeys(sharded.parameter for _, _, _, sharded in own_params(instance)))
    there = torch.tensor([part.grad is not None for part in parts], dtype=torch.uint8, device=instance.compute_device)
    if instance.world_size > 1:
        dist.all_reduce(there, dist.ReduceOp.MAX, group=instance.process_group)
    given = [part for part, is_there in zip(parts, there.tolist(), strict=True) if is_there and part.grad is None]
    for part in given:
        part.grad = torch.zeros_like(part)
    return given


def _check(
    instance: "FullyShardedDataParallel", writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    if with_grads and (offload_to_cpu or not instance._use_orig_params):
        raise NotImplementedError(
            f"with_grads={with_grads}, use_orig_params={instance._use_orig_params}, offload_to_cpu={offload_to_cpu} is not "
            "supported yet"
        )
    if offload_to_cpu and instance.sharding_strategy is ShardingStrategy.NO_SHARD:
        raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
    if writeback and rank0_only:
        raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters being redundantly copied to "
            "CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=5,
        )
    if instance.training_state is TrainingState.FORWARD_BACKWARD:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    if instance.training_state is TrainingState.SUMMON_FULL_PARAMS:
        raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")
