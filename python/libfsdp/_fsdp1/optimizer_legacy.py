"""PyTorch's older names for optimizers' state dicts."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as PyTorchs
from torch.distributed.fsdp import OptimStateKeyType

from .optimizer_names import Key, OptimizerInput, warn_optim_input
from .optimizer_state_dicts import StateDict, by_keys, by_names


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimizerInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Whole states by name, on the host. Collective."""
    _warn_legacy("full_optim_state_dict", "optim_state_dict")
    warn_optim_input(optim_input)
    wanted = not rank0_only or dist.get_rank(group) == 0
    return by_names(model, optim, optim.state_dict(), optim_input=optim_input, in_rows=False, wanted=wanted)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> StateDict:
    """The same in rows. Collective."""
    _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
    return by_names(model, optim, optim.state_dict(), in_rows=True, wanted=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: OptimizerInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> StateDict:
    """What this rank's optimizer takes of whole states. Nothing is communicated."""
    _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
    warn_optim_input(optim_input)
    return by_keys(model, optim, full_optim_state_dict, optim_input=optim_input)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
) -> StateDict:
    """The same of states in rows. Collective."""
    _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return by_keys(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimizerInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """The same of whole states that only the first rank has to give. Collective."""
    _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    warn_optim_input(optim_input)
    given = full_optim_state_dict
    return by_keys(model, optim, given, optim_input=optim_input, from_first_rank=True, group=group)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimizerInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[Key, Any]:
    """Numbers in place of names, or the other way round, of an optimizer of a model that is not wrapped."""
    return PyTorchs.rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)


def _warn_legacy(name: str, successor: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{name}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{successor}``",
        FutureWarning,
        stacklevel=3,
    )
