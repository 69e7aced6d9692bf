"""One flat parameter in the places of a wrapper's parameters: what ``use_orig_params=False`` shows.

The module's code reads the handles, as ever; registered is ``_flat_param`` alone, this rank's share of all of them. Parts
of it are shown under the parameters' own names for a while only, whole: within ``summon_full_params``, or by state dicts.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _C
from .._registered import Registered, remember
from .._sharded import OnTheWhole, Sharded
from .._summon import Slot, Whole
from .device import Place
from .plain import Calls
from .state import WrapperState

FLAT_NAME = "_flat_param"


class Flat:
    """The flat parameter of a unit. Refers to no module, so that modules are freed by reference counting."""

    __slots__ = ("__weakref__", "owner", "parameter", "unit")
    around = None
    is_extended = False

    def __init__(self, unit: _C.Unit, owner: nn.Module):
        self.unit, self.owner = unit, weakref.ref(owner)
        self._become(_C.flat_shard_of(unit))

    def _become(self, tensor: torch.Tensor, former: torch.Tensor | None = None) -> None:
        if type(tensor) is torch.Tensor:
            tensor.__class__ = nn.Parameter
        tensor._is_flat_param = True  # ``isinstance(tensor, FlatParameter)`` asks for this
        remember(tensor, self, former)
        self.parameter = tensor

    @property
    def handle(self) -> torch.Tensor:
        """What the engine knows it by."""
        return self.parameter

    def is_shown_as(self, tensor: torch.Tensor) -> bool:
        return tensor is self.parameter

    @property
    def registered(self) -> Registered:
        return Registered.of(self.owner())

    @property
    def is_registered(self) -> bool:
        return FLAT_NAME in self.registered

    def enter(self) -> None:
        dict.__setitem__(self.registered, FLAT_NAME, self.parameter)

    def leave(self) -> None:
        dict.pop(self.registered, FLAT_NAME, None)

    def follow(self) -> None:
        """Takes over what users have registered in its place."""
        current = self.registered[FLAT_NAME]
        if current.shape != self.parameter.shape:
            raise RuntimeError(
                f"Cannot writeback when the parameter shape changes\nExpects {tuple(self.parameter.shape)} but got "
                f"{tuple(current.shape)} for '{FLAT_NAME}'"
            )
        if current is not self.parameter or not _C.is_flat_shard(self.unit, current):
            _C.set_flat_shard(self.unit, current)
            self._become(current, former=self.parameter)


class OnThePart(OnTheWhole):
    """What is done to one parameter that concerns all of the flat one."""

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad != self.handle().requires_grad:
            raise RuntimeError(
                "a parameter cannot be frozen, or trained, alone where it is part of a flat parameter: set requires_grad "
                "of that one, which parameters() gives, or wrap with use_orig_params=True"
            )
        return self.shadow()

    def register_post_accumulate_grad_hook(self, _hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        raise RuntimeError(
            "a parameter that is part of a flat parameter has no gradient of its own: register the hook on that one, which "
            "parameters() gives, or wrap with use_orig_params=True"
        )


class Part(Sharded):
    """A parameter that is hidden: part of a flat one."""

    __slots__ = ("flat",)

    def __init__(self, handle: torch.Tensor, flat: Flat):
        super().__init__(handle)
        self.flat, self.shown = flat, _C.shown_in_flat(handle)
        self.shape, self.stride = handle.shape, handle.stride()
        self.shadow = handle
        OnThePart(self).divert()
        remember(handle, self)

    @property
    def parameter(self) -> nn.Parameter:
        return self.flat.parameter

    @property
    def piece(self) -> torch.Tensor:
        """What this rank has of it."""
        return _C.shard_behind(self.handle)

    def is_shown_as(self, tensor: torch.Tensor) -> bool:
        return tensor is self.handle

    def _register(self, registered: Registered, name: str) -> None:
        registered.hide(name, self)

    def heed_assignment(self, name: str, tensor: torch.Tensor | None) -> None:
        """To the module's attribute. It is the handle itself in ``module.weight += 1``."""
        if tensor is not self.handle:
            raise RuntimeError(
                f"'{name}' is part of a flat parameter and cannot be replaced: write values into it, assign it within "
                "summon_full_params, or wrap with use_orig_params=True"
            )

    def follow(self, module: nn.Module, name: str) -> None:
        """After whatever users have done to the flat parameter, or to the handle past all operators."""
        _C.restore_handle(self.unit, self.handle)
        _C.follow_requires_grad(self.handle)
        self.handle.detach()  # an operator, before which the engine takes over new data; collective then
        self.enter(module, name)


PlaceOfPart = tuple[str, nn.Module, str, Part]
"""A part's path, its module, its name there, and itself."""


class FlatState(WrapperState):
    """Of a wrapper whose parameters are shown as one, or which has none."""

    def __init__(self, unit: _C.Unit, place: Place, calls: Calls):
        super().__init__(unit, place, calls)
        self.flat: Flat | None = None

    def show_flat(self, owner: nn.Module) -> Flat:
        self.flat = Flat(self.unit, owner)
        self.flat.enter()
        return self.flat

    def sharded(self) -> Iterator[tuple[nn.Module, str, Part]]:
        for reference, name in self.places:
            module = reference()
            if module is not None:
                yield module, name, Registered.of(module).hidden[name]

    def _watch(self, module: nn.Module, name: str) -> None:
        part = Registered.of(module).hidden[name]
        self.places.append((weakref.ref(module), name))
        self.watch(part.flat.registered, FLAT_NAME, part.parameter, part.handle, part.shown)
        self.watch_shadow(weakref.ref(module), name, part.handle, part.parameter)

    @torch.inference_mode(False)
    def follow(self, called: nn.Module | None = None) -> None:
        self.end_loading()
        parts = list(self.sharded())
        flats = {part.flat for _, _, part in parts}
        if not all(flat.is_registered for flat in flats):
            return  # the parameters are shown whole
        for flat in flats:
            flat.follow()
        self.places = []
        self.forget()
        for module, name, part in parts:
            part.follow(module, name)
            self._watch(module, name)


@contextlib.contextmanager
def summoned(
    state: FlatState,
    places: list[PlaceOfPart],
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
) -> Iterator[dict[Slot, Whole]]:
    """Whole parameters of this unit are in the places, on the ranks that are to have them. What users assign there: as in
    ``_summon.summoned``."""
    wholes: dict[Slot, Whole] = {}
    slots = [(path, part.handle, _keeper(wholes, owner, name, part)) for path, owner, name, part in places]
    guard = _C.Summoned(slots, state.unit, writeback, rank0_only, offload_to_cpu, False)
    with shown(state, [place for place in places if place[1:3] in wholes], lambda slot: wholes[slot].tensor):
        try:
            yield wholes
        finally:
            guard.end()


def _keeper(
    wholes: dict[Slot, Whole], owner: nn.Module, name: str, part: Part
) -> Callable[[torch.Tensor], None]:
    def keep(whole: torch.Tensor) -> None:
        whole._is_param = True
        wholes[owner, name] = Whole(whole, whole, part)

    return keep


@contextlib.contextmanager
def shown(
    state: FlatState, places: Iterable[PlaceOfPart], tensor_at: Callable[[Slot], torch.Tensor]
) -> Iterator[None]:
    """Tensors are registered in these places, and the flat parameter is not, if there are any."""
    places = list(places)
    by_owner: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for _, owner, name, _ in places:
        by_owner.setdefault(owner, {})[name] = tensor_at((owner, name))
    if places and state.flat is not None:
        state.flat.leave()
    for owner, tensors in by_owner.items():
        Registered.of(owner).show_hidden(tensors)
    try:
        yield
    finally:
        for _, owner, name, part in places:
            part.enter(owner, name)
        if places and state.flat is not None:
            state.flat.enter()
