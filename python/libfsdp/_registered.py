"""A module's registered parameters, where some are sharded."""

import copy
import weakref
from collections.abc import Iterable, Iterator, ValuesView
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _C

if TYPE_CHECKING:
    from ._sharded import Sharded


_known: "weakref.WeakValueDictionary[int, Sharded]" = weakref.WeakValueDictionary()


def remember(tensor: torch.Tensor, sharded: "Sharded", former: torch.Tensor | None = None) -> None:
    """``tensor`` stands for a sharded parameter from now on: as what is registered, or as what is read."""
    if former is not None:
        _known.pop(id(former), None)
    _known[id(tensor)] = sharded


def sharded_behind(tensor: torch.Tensor | None) -> "Sharded | None":
    """The sharded parameter that a tensor stands for."""
    sharded = _known.get(id(tensor))
    return sharded if sharded is not None and sharded.is_shown_as(tensor) else None


def is_flat(tensor: torch.Tensor | None) -> bool:
    """Whether it stands for several parameters, which are hidden."""
    return getattr(tensor, "_is_flat_param", False)


class Registered(dict):
    """Takes the place of ``module._parameters``. Where a parameter is exchanged for a while, as
    ``torch.func.functional_call`` does, what the module's code reads is exchanged with it."""

    __slots__ = ("hidden", "module", "order", "sharded")

    def __init__(self, module: nn.Module):
        super().__init__(module._parameters)
        self.module = weakref.ref(module)
        self.sharded: dict[str, Sharded] = {}
        self.hidden: dict[str, Sharded] = {}  # by the names that they had here: what is registered stands elsewhere
        self.order = {name: place for place, name in enumerate(self)}

    @staticmethod
    def of(module: nn.Module) -> "Registered":
        if not isinstance(module._parameters, Registered):
            module.__dict__["_parameters"] = Registered(module)
        return module._parameters

    def enter(self, name: str, sharded: "Sharded") -> None:
        self.sharded[name] = sharded
        dict.__setitem__(self, name, sharded.parameter)
        if sharded.parameter.is_meta:  # there is nothing whole to show: whoever loads values is shown where they belong
            self.module().__dict__.pop(name, None)
        else:
            self.module().__dict__[name] = sharded.shadow

    def hide(self, name: str, sharded: "Sharded") -> None:
        """Nothing is registered there from now on. The module's code reads the handle."""
        self.hidden[name] = sharded
        dict.pop(self, name, None)
        self.module().__dict__[name] = sharded.shadow

    def show_hidden(self, tensors: dict[str, torch.Tensor]) -> None:
        """In the places of hidden parameters, until they are hidden again."""
        for name in tensors:
            self.module().__dict__.pop(name, None)
        items = self._in_order({**dict(super().items()), **tensors})
        dict.clear(self)
        dict.update(self, items)

    def slots(self) -> Iterable[tuple[str, torch.Tensor | None]]:
        """What stands for the parameters that belong here: what is registered, or the handles of those that are hidden."""
        if not self.hidden:
            return self.items()
        own = {name: tensor for name, tensor in self.items() if not is_flat(tensor)}
        return self._in_order({**{name: sharded.handle for name, sharded in self.hidden.items()}, **own}).items()

    def _in_order(self, items: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """In which parameters were registered before they were sharded."""
        last = len(self.order)
        return dict(sorted(items.items(), key=lambda item: self.order.get(item[0], last)))

    def items(self) -> Iterable[tuple[str, torch.Tensor | None]]:
        self._heed_wholes()
        waits = any(sharded.parameter.is_meta for sharded in self.sharded.values())
        if waits:
            return self._items_that_get_values()
        others = self._listed_otherwise()
        return {**dict(super().items()), **others}.items() if others else super().items()

    def _listed_otherwise(self) -> dict[str, torch.Tensor]:
        """Than by what is registered."""
        return {
            name: listed
            for name, sharded in self.sharded.items()
            if (listed := sharded.listed) is not sharded.parameter and self.get(name) is sharded.parameter
        }

    def _items_that_get_values(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """``Module.to_empty`` gives them memory one after another."""
        for item in list(super().items()):
            yield item
            self._heed_wholes()

    def values(self) -> ValuesView[torch.Tensor | None]:
        self._heed_wholes()
        others = self._listed_otherwise()
        return {**dict(super().items()), **others}.values() if others else super().values()

    def _heed_wholes(self) -> None:
        """Whoever lists parameters finds what users have set on what the module's code reads."""
        for name, sharded in self.sharded.items():
            if self.get(name) is not sharded.parameter:
                continue
            sharded.heed_whole()
            sharded.shown.note_replacement()  # a conversion lists before it replaces
            if name not in self.module().__dict__ and not sharded.parameter.is_meta:
                for module, place in sharded.homes():
                    sharded.enter(module, place)

    def has(self, name: str, sharded: "Sharded") -> bool:
        """Whether a sharded parameter is at home in this place, or what users have put there for good."""
        return self.sharded.get(name) is sharded and self.get(name) is not None and not self.is_exchanged(name)

    def exchange_quietly(self, name: str, tensor: torch.Tensor) -> None:
        """What the module's code reads stays."""
        dict.__setitem__(self, name, tensor)

    def is_exchanged(self, name: str) -> bool:
        """For a while: an assignment to the module's attribute, which is for good, takes the shadow away."""
        return self[name] is not self.sharded[name].parameter and name in self.module().__dict__

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        if name in self.hidden and name not in self:
            self.module().__dict__[name] = self.hidden[name].shadow
            self.hidden[name].heed_assignment(name, tensor)
            return
        sharded, seen = self.sharded.get(name), self.module().__dict__
        if sharded is not None and name not in seen and (given := sharded_behind(tensor)):
            given.enter(self.module(), name)  # itself, as in ``module.weight += 1``, or another one to be tied to
            return
        dict.__setitem__(self, name, tensor)
        if sharded is None:
            return
        if name not in seen and tensor is not None:
            self._put_in_all_places(sharded, tensor)
        elif name in seen:
            seen[name] = sharded.shadow if tensor is sharded.parameter else _whole(tensor, name, sharded)

    def _put_in_all_places(self, sharded: "Sharded", tensor: torch.Tensor) -> None:
        """A tied parameter stays tied when one of its places gets another parameter."""
        _C.ModuleState.note_replacement()
        for module, name in sharded.homes():
            dict.__setitem__(module._parameters, name, tensor)
            module.__dict__.pop(name, None)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)
        if name in self.sharded:
            self.module().__dict__.pop(name, None)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor | None]:
        """Of a module that is copied with the one that shards its parameters, or while these are whole: then what the
        module's code reads is copied as what is registered."""
        for name, sharded in {**self.sharded, **self.hidden}.items():
            present = dict.get(self, name)
            is_whole = present is not None and present is not sharded.parameter
            if is_whole and name in self.module().__dict__:
                memo[id(self.module().__dict__[name])] = copy.deepcopy(present, memo)
            elif not is_whole and (name in self.hidden or present is not None):
                self._check_copied(name, sharded, memo)
        return copy.deepcopy(dict(self), memo)

    def _check_copied(self, name: str, sharded: "Sharded", memo: dict[int, Any]) -> None:
        if id(sharded.handle) not in memo:
            raise TypeError(
                f"copy.deepcopy of a {type(self.module()).__name__} whose '{name}' a module above it has sharded: copy that "
                "module, or this one within summon_full_params, where parameters are whole and so are the copy's"
            )


def _is_traced(tensor: torch.Tensor | None) -> bool:
    """Whether it has no values, as what ``torch.export`` puts into the places of parameters."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(getattr(tensor, "_local_tensor", tensor), (FakeTensor, FunctionalTensor))


def _whole(tensor: torch.Tensor | None, name: str, sharded: "Sharded") -> torch.Tensor | None:
    if _is_traced(tensor):
        raise NotImplementedError(
            f"torch.export does not see through the gathers of a sharded module, here of '{name}': export the module that "
            "fully_shard was not called on, with the values that full_tensor() of the sharded parameters gives"
        )
    if not isinstance(tensor, DTensor) or isinstance(sharded.shadow, DTensor):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"functional_call was given a sharded tensor that requires a gradient for '{name}': give the whole one, "
            "tensor.full_tensor(), whose gradient is then this rank's own"
        )
    return tensor.full_tensor()
