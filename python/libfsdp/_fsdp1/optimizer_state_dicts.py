"""Optimizers' state dicts by the names of the unwrapped model's parameters, and back."""

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType

from .first_rank import FromFirstRank
from .flat import Flat, Part
from .optimizer_flat import join, split
from .optimizer_names import Key, OptimizerInput, Originals, is_by_name, keys_of, originals_of
from .optimizer_states import Sharded, State, part_of_state, whole_states
from .places import own_params
from .state import instances_below
from .state_dict_types import get_type

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel

StateDict = dict[str, Any]
Group = dist.ProcessGroup | None


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: StateDict | None = None, group: Group = None
) -> StateDict:
    """The state of a model's optimizer as it is of the unwrapped model, with names in place of numbers: whole, or in
    rows with ``SHARDED_STATE_DICT``. Copies, on the host unless ``offload_to_cpu=False`` was set. Collective."""
    settings = get_type(model)
    config = settings.optim_state_dict_config
    in_rows = settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    return by_names(
        model,
        optim,
        optim.state_dict() if optim_state_dict is None else optim_state_dict,
        in_rows=in_rows,
        wanted=not getattr(config, "rank0_only", False) or dist.get_rank(group) == 0,
        offload_to_cpu=config.offload_to_cpu,
    )


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Group = None,
) -> StateDict:
    """What ``optim.load_state_dict`` takes, of what ``optim_state_dict`` gave: from whatever wrapping and number of
    ranks, or from an unwrapped model. Collective for rows, and with ``rank0_only=True``, where rank 0 alone has to give
    a state."""
    rank0_only = getattr(get_type(model).optim_state_dict_config, "rank0_only", False)
    result = by_keys(
        model, optim, optim_state_dict, by_name=is_named_optimizer, from_first_rank=rank0_only, group=group
    )
    if load_directly:
        optim.load_state_dict(result)
    return result


def by_names(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: StateDict,
    *,
    optim_input: OptimizerInput = None,
    in_rows: bool,
    wanted: bool,
    offload_to_cpu: bool = True,
) -> StateDict:
    _heed_replaced(model)
    originals, keys = originals_of(model), keys_of(model, optim, optim_input, is_by_name(given))
    _check_belong(keys, originals)
    states: dict[str, State] = {}
    for param, key in keys.items():
        if key in given["state"]:
            states.update(_split(originals[param], given["state"][key]))
    whole: dict[str, State] = {}
    for wrapper, own in _by_wrapper(model, originals).items():
        whole.update(whole_states(wrapper, own, states, in_rows, offload_to_cpu, wanted))
    if not wanted:
        return {}
    names = {name: sharded for own in originals.values() for name, sharded in own.items()}
    whole.update((name, _copied(state, offload_to_cpu)) for name, state in states.items() if names[name] is None)
    result: StateDict = {"state": {name: whole[name] for name in names if name in whole}}
    result["state"].update(_states_of_no_parameter(given["state"], keys))
    if "param_groups" in given:
        by_key = {key: list(originals[param]) for param, key in keys.items()}
        result["param_groups"] = _with_params(
            given["param_groups"], lambda listed: [name for key in listed for name in by_key[key]]
        )
    return result


def by_keys(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    given: StateDict | None,
    *,
    optim_input: OptimizerInput = None,
    by_name: bool = False,
    from_first_rank: bool = False,
    group: Group = None,
) -> StateDict:
    _heed_replaced(model)
    originals, keys = originals_of(model), keys_of(model, optim, optim_input, by_name)
    wrapper_of = {part: wrapper for wrapper, own in _by_wrapper(model, originals).items() for part in own.values()}
    if from_first_rank:
        device = next((wrapper.compute_device for wrapper in wrapper_of.values()), torch.device("cpu"))
        values = FromFirstRank(given, device, group)
        given = values.outline
    if "state" not in given:
        raise ValueError('`optim_state_dict` must have the keys "state" to be a valid optimizer state dict')
    states: dict[Key, Any] = {}
    for param in [param for param in originals if param in keys]:
        parts: dict[str, State] = {}
        for name, sharded in originals[param].items():
            state = given["state"].get(name, {})
            state = values.fetch(state) if from_first_rank else state
            parts[name] = (
                _copied(state, False) if sharded is None else part_of_state(sharded, name, state, wrapper_of[sharded])
            )
        if mine := _joined(originals[param], parts):
            states[keys[param]] = mine
    known = {name for own in originals.values() for name in own}
    for key, state in given["state"].items():
        if key not in known:
            states[key] = values.fetch(state) if from_first_rank and isinstance(state, dict) else copy.copy(state)
    result: StateDict = {"state": states}
    if "param_groups" in given:
        numbers = {name: keys[param] for param, own in originals.items() if param in keys for name in own}
        _check_named(given["param_groups"], numbers)
        result["param_groups"] = _with_params(
            given["param_groups"], lambda listed: sorted({numbers[name] for name in listed})
        )
    return result


def _heed_replaced(model: nn.Module) -> None:
    for wrapper in instances_below(model):
        if not wrapper._summoned:
            wrapper._fsdp_state.heed()


def _by_wrapper(
    model: nn.Module, originals: dict[nn.Parameter, Originals]
) -> "dict[FullyShardedDataParallel, dict[str, Sharded]]":
    """Which wrapper's process group has the parts of a parameter; of a tied one's, the first."""
    names = {sharded: name for own in originals.values() for name, sharded in own.items() if sharded is not None}
    found: dict[FullyShardedDataParallel, dict[str, Sharded]] = {}
    for wrapper in instances_below(model):
        for _, _, _, sharded in own_params(wrapper):
            if sharded in names:
                found.setdefault(wrapper, {})[names.pop(sharded)] = sharded
    return found


def _flat_behind(originals: Originals) -> Flat | None:
    return next((part.flat for part in originals.values() if isinstance(part, Part)), None)


def _split(originals: Originals, state: State) -> dict[str, State]:
    flat = _flat_behind(originals)
    return {name: state for name in originals} if flat is None else split(flat, originals, state)


def _joined(originals: Originals, parts: dict[str, State]) -> State:
    """What an optimizer has of a parameter, which may be flat."""
    flat = _flat_behind(originals)
    if flat is not None:
        return join(flat, originals, parts)
    return next(iter(parts.values()))


def _copied(state: State, offload_to_cpu: bool) -> State:
    """Of a parameter that no wrapper shards."""
    return {
        kind: value.detach().to("cpu" if offload_to_cpu else value.device, copy=True) if torch.is_tensor(value) else value
        for kind, value in state.items()
    }


def _states_of_no_parameter(states: dict[Key, Any], keys: dict[nn.Parameter, Key]) -> dict[Key, Any]:
    known = set(keys.values())
    others = {key: state for key, state in states.items() if key not in known}
    for key in others:
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process: it belongs to no parameter of the optimizer, and is "
            "taken over as it is",
            stacklevel=5,
        )
    return others


def _with_params(groups: list[dict[str, Any]], rename: Callable[[list[Key]], list[Key]]) -> list[dict[str, Any]]:
    """Copies of groups of hyper-parameters whose parameters have other keys."""
    return [{**copy.deepcopy(group), "params": rename(group["params"])} for group in groups]


def _check_belong(keys: dict[nn.Parameter, Key], originals: dict[nn.Parameter, Originals]) -> None:
    strangers = [key for param, key in keys.items() if param not in originals]
    if strangers:
        raise ValueError(
            f"[optim_state_dict] expected an optimizer of the model's parameters, and of those that it was given, number "
            f"{strangers} are none: make the optimizer of model.parameters()"
        )


def _check_named(groups: list[dict[str, Any]], numbers: dict[str, Key]) -> None:
    strangers = [name for group in groups for name in group["params"] if name not in numbers]
    if strangers:
        raise KeyError(
            f"[optim_state_dict_to_load] the state's param_groups have {strangers}, which are no parameters that the "
            "optimizer was given: load into an optimizer of the same parameters as the one that was saved"
        )
