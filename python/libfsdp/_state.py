"""What ``fully_shard`` keeps of a module."""

import copy
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from . import _C
from ._layout import DataParallel
from ._registered import Registered
from ._sharded import Sharded


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced, within containers, named tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return _map_packed(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value)
    if isinstance(value, dict):
        mapped = value.copy()
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def _map_packed(function: Callable[[torch.Tensor], torch.Tensor], value: PackedSequence) -> PackedSequence:
    """Its indices are no data, but go where they go. Its batch sizes stay on the host."""
    data = function(value.data)
    indices = {name: getattr(value, name) for name in ("sorted_indices", "unsorted_indices")}
    moved = {name: None if each is None else each.to(data.device) for name, each in indices.items()}
    return value._replace(data=data, **moved)


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Of a dataclass. A copy, not a new one: ``__post_init__`` has run. It may be a dictionary too, as Hugging Face's
    outputs are, with the fields' values as its items."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    items = dict(value.items()) if isinstance(value, dict) else {}
    mapped = {id(item): (item, map_tensors(function, item)) for item in (*fields.values(), *items.values())}
    if all(before is after for before, after in mapped.values()):
        return value
    twin = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(twin, name, mapped[id(item)][1])  # it may be frozen
    for key, item in items.items():
        dict.__setitem__(twin, key, mapped[id(item)][1])
    return twin


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


class _Calls(threading.local):
    """How many sharded modules are being called, one from within the other."""

    running = 0


_calls = _Calls()
_numbers = itertools.count()


class FSDPState(_C.ModuleState):
    """One call of ``fully_shard``: its unit, and the places of its parameters. Shared by the modules of a list."""

    def __init__(self, unit: _C.Unit, arguments: dict[str, Any], parallels: list[DataParallel]):
        super().__init__(unit)
        self.number = next(_numbers)
        self.arguments = arguments
        self.parallels = parallels  # one for each mesh that the parameters are on
        self.device = parallels[0].device
        self.places: list[tuple[weakref.ref[nn.Module], str]] = []
        self.collective_settings: dict[str, dict[str, Any]] = {}  # setters and their arguments; a copy is given them too
        policy = arguments["mp_policy"]
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.moves_inputs = self.device.type != "cpu"
        self.converts = bool(self.input_dtype or self.output_dtype or self.moves_inputs)

    def only_parallel(self, setter: str) -> DataParallel:
        if len(self.parallels) > 1:
            raise ValueError(
                f"{setter} is for parameters on one mesh, and shard_placement_fn put this module's on "
                f"{len(self.parallels)}. Shard those on a mesh of their own in a call of their own, and set it there"
            )
        return self.parallels[0]

    def add(self, module: nn.Module, name: str, sharded: Sharded) -> None:
        sharded.enter(module, name)
        self._watch(module, name)
        self.pending |= sharded.needs_whole

    def sharded(self) -> Iterator[tuple[nn.Module, str, Sharded]]:
        """What is in the places. Users may have tied parameters since; and nothing may be there for a while."""
        for reference, name in self.places:
            module = reference()
            if module is not None and module._parameters.get(name) is not None:
                yield module, name, Registered.of(module).sharded[name]

    def _watch(self, module: nn.Module, name: str) -> None:
        self.places.append((weakref.ref(module), name))
        sharded = Registered.of(module).sharded[name]
        if module._parameters.get(name) is None:
            self.watch(module._parameters, name, None, None, None)
            return
        self.watch(module._parameters, name, sharded.parameter, sharded.handle, sharded.shown)
        if sharded.shadow is not sharded.handle:
            self.watch_shadow(weakref.ref(module), name, sharded.shadow, sharded.parameter)

    @torch.inference_mode(False)  # what is made here is trained later
    def follow(self, called: nn.Module | None = None) -> None:
        """Takes over parameters that users have registered in place of sharded ones. ``called``: a call of that module
        is about to read them."""
        if _C.is_summoned(self.unit):  # what is assigned there is taken at the guard's end
            _C.ModuleState.note_replacement()  # to be looked at again
            return
        places = [(module, name) for reference, name in self.places if (module := reference()) is not None]
        for module, name in places:
            if module._parameters.get(name) is not None:
                Registered.of(module).sharded[name].follow(module, name)
        self.places = []
        self.forget()
        for module, name in places:
            self._watch(module, name)
        self.pending = any(sharded.is_extended for _, _, sharded in self.sharded())
        if self.pending and called is not None:
            self.show_wholes()

    def follow_below(self, called: nn.Module) -> None:
        """The same for the modules below: their parameters may be read without a call of theirs."""
        for state in states_below(called):
            if not state.intact():
                state.follow(called)

    def show_wholes(self) -> None:
        """Of parameters that are tensor subclasses: they are made by the first gather."""
        places = list(self.sharded())
        if any(sharded.parameter.is_meta for _, _, sharded in places):
            return  # an operator on one of the others says what to do
        if any(sharded.needs_whole for _, _, sharded in places):
            self.unit.unshard(False)
            self.unit.reshard()
        for module, name, sharded in places:
            if not Registered.of(module).is_exchanged(name):
                sharded.enter(module, name)
        self.pending = False

    def _begins_a_forward(self) -> bool:
        """A module in the middle of one is given what its caller wants it to have: lengths may stay on the host."""
        recomputes = torch._C._current_graph_task_id() != -1
        return not self.unit.name or (_calls.running == 0 and not recomputes)

    def convert_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.moves_inputs and self._begins_a_forward():
            args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        if self.input_dtype:
            args, kwargs = map_tensors(_cast_to(self.input_dtype), (args, kwargs))
        return args, kwargs

    def convert_outputs(self, outputs: Any) -> Any:
        return map_tensors(_cast_to(self.output_dtype), outputs) if self.output_dtype else outputs

    # What PyTorch's own ``register_fsdp_forward_method`` and ``share_comm_ctx`` ask of a module's state.

    def _pre_forward(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return self.convert_inputs(args, kwargs)

    def _post_forward(self, _module: nn.Module, _inputs: tuple, outputs: Any) -> Any:
        return self.convert_outputs(outputs)

    @property
    def _comm_ctx(self) -> _C.Unit:
        return self.unit

    @_comm_ctx.setter
    def _comm_ctx(self, of: _C.Unit) -> None:
        _C.share_comm_ctx([of, self.unit])

    _fsdp_param_groups = ()
    _fsdp_param_group = None  # torch 2.11

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """``function(module, ...)`` through the module's boundary; ``args`` begin with the module."""
        if self.device.type == "cuda":
            _check_not_captured()
        inputs, kwargs = self.convert_inputs(args[1:], kwargs)
        _calls.running += 1
        try:
            outputs = function(args[0], *inputs, **kwargs)
        finally:
            _calls.running -= 1
        return self.convert_outputs(outputs)


def _check_not_captured() -> None:
    """A graph reads where parameters lay when it was made; they lie there only as long as they are whole."""
    if torch.cuda.is_current_stream_capturing():
        raise _C.Error(
            "[forward] a sharded module is called while its stream is captured into a CUDA graph, which would read its "
            "parameters where they lie now, also when other values lie there: capture only what has no sharded parameters"
        )


def state_of(module: nn.Module) -> FSDPState | None:
    return module.__dict__.get("_fsdp_state")


def states_below(module: nn.Module) -> list[FSDPState]:
    """From ``module`` down, in the order in which they were made."""
    return sorted(set(filter(None, map(state_of, module.modules()))), key=lambda state: state.number)
