"""The state of an optimizer of ``torch.optim`` by the names of the unsharded model's parameters, as C++ has it: tensors that
are cut as the parameters are, and numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _C
from ._fsdp1.optimizer_flat import join, split
from ._held import Named

State = dict[str, Any]
Held = dict[str, _C.HeldTensor]
StateByName = tuple[list[tuple[str, Held, State]], list[tuple[list[str], State]]]
"""States (name, tensors, numbers), and groups (names, hyper-parameters)."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
_ANOTHER = "[load] the state is another optimizer's, and nothing was loaded:\n{}\nMake the model and the optimizer from which it was saved, with the same groups"


class OptimizerByName:
    """For the time of a call."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[Named]):
        self._optimizer = optimizer
        self._first: dict[str, Named] = {}  # by any name
        self._of_param: dict[int, dict[str, Named]] = {}  # by first names; several of a flat parameter
        known: dict[int, Named] = {}
        for each in named:
            if not each.is_buffer:
                first = known.setdefault(id(each.part or each.tensor), each)
                self._first[each.name] = first
                if first is each:
                    self._of_param.setdefault(id(each.tensor), {})[each.name] = each
        for param in self._params():
            if id(param) not in self._of_param:
                raise _C.Error(
                    f"[optimizer] the optimizer has a parameter of sizes {list(param.shape)} that is not the model's: give "
                    "the model of whose parameters it was made, after these were sharded"
                )

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _names(self, params: Iterable[torch.Tensor]) -> list[str]:
        return list(dict.fromkeys(name for param in params for name in self._of_param[id(param)]))

    def state(self) -> StateByName:
        states = []
        for param in dict.fromkeys(self._params()):
            state = self._optimizer.state.get(param)
            for name, each in self._of_param[id(param)].items() if state else ():
                own = state if each.part is None else split(each.part.flat, {name: each.part}, state)[name]
                states.append((name, *_tensors_and_numbers(each, own)))
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: _option(key, value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append((self._names(group["params"]), options))
        return states, groups

    def made(self, read: StateByName) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes, in memory of its own."""
        states, groups = read
        self._check(states, groups)
        given: dict[str, State] = {self._first[name].name: self._state(name, *more) for name, *more in states}
        now = self._optimizer.state_dict()
        numbers = [number for group in now["param_groups"] for number in group["params"]]
        made: dict[int, State] = {}
        for number, param in zip(numbers, self._params(), strict=True):
            if state := self._joined(param, given):
                made[number] = state
            elif isinstance(self._optimizer, torch.optim.Adagrad) and number in now["state"]:
                made[number] = now["state"][number]  # it makes states at its beginning only
        options = [
            {**group, **{key: _as_before(group.get(key), value) for key, value in there.items()}}
            for group, (_, there) in zip(now["param_groups"], groups, strict=True)
        ]
        return {**now, "state": made, "param_groups": options}

    def _state(self, name: str, tensors: Held, numbers: State) -> State:
        named = self._first[name]
        return {**numbers, **{key: _as_cut(named, held) for key, held in tensors.items()}}

    def _joined(self, param: torch.Tensor, given: dict[str, State]) -> State:
        own = self._of_param[id(param)]
        parts = {name: each.part for name, each in own.items() if each.part is not None}
        if not parts:
            return given.get(next(iter(own)), {})
        states = {name: given.get(name, {}) for name in parts}
        return join(next(iter(parts.values())).flat, parts, _of_one_dtype(_with_numbers(states)))

    def _check(self, states: list, groups: list) -> None:
        mine, wrong = self._optimizer.param_groups, []
        trained = {id(param) for param in self._params()}
        for name, tensors, _ in states:
            first = self._first.get(name)
            if first is None or id(first.tensor) not in trained:
                wrong.append(f"'{name}' is no parameter of this optimizer's")
            else:
                wrong += [
                    f"'{name}' has sizes {first.held.sizes} in the model, its '{key}' {held.sizes}"
                    for key, held in tensors.items()
                    if held.sizes != first.held.sizes
                ]
        if len(groups) != len(mine):
            wrong.append(f"groups of parameters: {len(mine)} here and {len(groups)} there")
        for number, ((names, options), group) in enumerate(zip(groups, mine)):
            here = set(self._names(group["params"]))
            there = {self._first[name].name if name in self._first else name for name in names}
            if here != there:
                wrong.append(f"group {number}, missing: {sorted(here - there)}; unexpected: {sorted(there - here)}")
            strange = [key for key, value in options.items() if value and key not in group and key not in _OF_SCHEDULERS]
            if strange:
                wrong.append(f"group {number} has {strange}, which this {type(self._optimizer).__name__} does not know")
        if wrong:
            raise _C.Error(_ANOTHER.format("\n".join(wrong)))


def _with_numbers(states: dict[str, State]) -> dict[str, State]:
    """Those that have no state get another's numbers: what becomes one parameter takes one step."""
    first = next((state for state in states.values() if state), {})
    numbers = {key: None if isinstance(value, torch.Tensor) else value for key, value in first.items()}
    return {name: state or numbers for name, state in states.items()}


def _of_one_dtype(states: dict[str, State]) -> dict[str, State]:
    """Each kind of state: a flat parameter has one of each."""
    dtypes: dict[str, torch.dtype] = {}
    for state in states.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                dtypes[key] = torch.promote_types(dtypes.get(key, value.dtype), value.dtype)
    return {
        name: {key: value.to(dtypes[key]) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for name, state in states.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _as_cut(named: Named, read: _C.HeldTensor) -> torch.Tensor:
    """Of the dtype that was saved; the optimizer's ``load_state_dict`` says which one it wants."""
    like = named.tensor if named.part is None else named.part.piece
    values = read.local
    if (values.shape, values.device) != (_local(like).shape, _local(like).device):
        values = torch.empty_like(_local(like), dtype=values.dtype, requires_grad=False)
        _C.copy_elements(read, _C.held_like(named.held, values))
    if not isinstance(like, DTensor):
        return values
    cut = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(values, like.device_mesh, like.placements, run_check=False, **cut)


def _tensors_and_numbers(named: Named, state: State) -> tuple[Held, State]:
    tensors: Held = {}
    numbers: State = {}
    for key, value in state.items():
        if value is None:
            continue
        if _is_number(value, key, named):
            numbers[key] = _number(value)
        elif isinstance(value, torch.Tensor) and type(_local(value)) is torch.Tensor and _is_cut_alike(value, named):
            tensors[key] = _C.held_like(named.held, _local(value).detach())
        else:
            kind = f"a tensor of sizes {list(value.shape)}" if isinstance(value, torch.Tensor) else str(type(value))
            raise _C.Error(
                f"[save] '{key}' of '{named.name}' is {kind}: expected optimizers whose states are numbers, and tensors that "
                "have an element for each of the parameter. Use torch.distributed.checkpoint, or torch.save it once per rank"
            )
    return tensors, numbers


def _is_number(value: Any, key: str, named: Named) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and (len(named.held.sizes) > 0 or key == "step")
    return isinstance(value, (bool, int, float))


def _is_cut_alike(value: torch.Tensor, named: Named) -> bool:
    return _local(value).shape == named.held.local.shape


def _number(value: Any) -> Any:
    """Whole ones as such: C++ counts steps so."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _option(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_option(key, each) for each in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _C.Error(
        f"[save] the hyper-parameter '{key}' is {type(value)}: expected numbers, texts, and lists and tuples of these. Use "
        "torch.distributed.checkpoint"
    )


def _as_before(now: Any, value: Any) -> Any:
    """In a tensor where it is in one now."""
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, value)
    if isinstance(now, tuple) and isinstance(value, tuple) and len(now) == len(value):
        return tuple(_as_before(old, new) for old, new in zip(now, value))
    return value
