"""A sharded parameter in Python: what is registered, and the handle that shadows it.

``module._parameters[name]`` stands for this rank's shard; ``module.__dict__[name]`` is the handle, which normal attribute
lookup finds first. So the module's own code reads the whole parameter, and ``parameters()``, ``state_dict()`` and
optimizers see the shard. Nothing is exchanged in a step.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from . import _C
from ._registered import Registered, remember, sharded_behind


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """What the engine knows a parameter by."""
    sharded = extended_of(parameter)
    if sharded is not None:
        return sharded.shown.shard
    sharded = sharded_behind(parameter)
    if sharded is not None:
        return sharded.handle
    handle = getattr(parameter, "_fsdp_handle", None)
    return original_local(parameter) if handle is None else handle


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """What has the gradient."""
    sharded = extended_of(parameter)
    return original_local(parameter) if sharded is None else sharded.shown.shard


def original_local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def extended_of(parameter: torch.Tensor) -> "Sharded | None":
    """Of a parameter that is gathered by hooks of its own."""
    reference = getattr(parameter, "_fsdp_sharded", None)
    return None if reference is None else reference()


class OnTheWhole:
    """What users do to a whole parameter that concerns gradients, which the registered one gets. Holds no reference."""

    methods: tuple[str, ...] = ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__getstate__")

    def __init__(self, sharded: "Sharded"):
        self.sharded = weakref.ref(sharded)
        self.shadow, self.handle = weakref.ref(sharded.shadow), weakref.ref(sharded.handle)

    def divert(self) -> None:
        for name in self.methods:
            setattr(self.shadow(), name, getattr(self, name))

    def attributes(self) -> tuple[str, ...]:
        """That the whole has of us."""
        return self.methods

    def __getstate__(self) -> dict:
        """Of the tensor, for pickling: without these attributes."""
        return {name: value for name, value in vars(self.shadow()).items() if name not in self.attributes()}

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        self.sharded().parameter.requires_grad_(requires_grad)
        torch.Tensor.requires_grad_(self.handle(), requires_grad)
        return self.shadow()

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        return self.sharded().parameter.register_post_accumulate_grad_hook(hook)

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """For the gradient of this rank alone. PyTorch puts hooks of Python in the place of the engine's; the first one
        here does what that does."""
        handle = self.handle()
        if not handle._backward_hooks:
            torch.Tensor.register_hook(handle, self._expect_gradient)
        return torch.Tensor.register_hook(self.shadow(), hook)

    def keep_hooks(self, original: nn.Parameter) -> None:
        """Those that were registered before it was sharded."""
        if stepping := original._post_accumulate_grad_hooks:
            self.sharded().parameter._post_accumulate_grad_hooks = stepping
        hooks = original._backward_hooks
        if self.handle() is original and hooks is not None:
            first = RemovableHandle(hooks)
            hooks[first.id] = self._expect_gradient
            hooks.move_to_end(first.id, last=False)
            original._backward_hooks = hooks  # again: they may not be in effect, and an empty dictionary never is

    def _expect_gradient(self, _gradient: torch.Tensor) -> None:
        """Users may have thawed it since its forward; and what stands in for the last gradient is none."""
        handle = self.handle()
        if _C.belongs_to_unit(handle):
            _C.follow_requires_grad(handle)
        else:  # a subclass, whose parts do
            torch.Tensor.requires_grad_(handle, self.sharded().parameter.requires_grad)
        if handle.requires_grad:
            handle.grad = None


def _leave_apart() -> None:
    """In place of an RNN's ``flatten_parameters``, which on a GPU wants addresses, of memory that is not there."""


class Sharded:
    """One parameter; tied ones share it. Refers to no module, so that modules are freed by reference counting."""

    __slots__ = ("__weakref__", "handle", "parameter", "places", "shadow", "shape", "shown", "stride", "unit")
    is_extended = False
    around = None  # of what the module reads, if that is not the handle itself

    def __init__(self, shard: torch.Tensor):
        self.places: list[tuple[weakref.ref[nn.Module], str]] = []  # several if it is tied
        self.handle, self.unit = _C.handle_of(shard), _C.module_of(shard)

    def _note(self) -> None:
        """That the two tensors stand for this parameter."""
        remember(self.handle, self)
        remember(self.parameter, self)

    @property
    def needs_whole(self) -> bool:
        """Whether there is nothing for the module's code to read before a first gather."""
        return False

    @property
    def listed(self) -> torch.Tensor:
        """What ``parameters()`` gives."""
        return self.parameter

    def is_shown_as(self, tensor: torch.Tensor) -> bool:
        return tensor is self.handle or tensor is self.parameter

    def _show_handle(self) -> None:
        """Makes what the module's code reads."""
        self.shadow = self.handle
        OnTheWhole(self).divert()

    def as_given(self, whole: torch.Tensor) -> nn.Parameter:
        """In the memory of a plain tensor, a parameter as the one that was sharded."""
        return whole

    def plain_of(self, given: torch.Tensor, name: str) -> torch.Tensor:
        """The other way round."""
        return given

    def _accept(self, current: nn.Parameter, name: str) -> nn.Parameter:
        """What is registered from now on, of what users have put there."""
        raise NotImplementedError

    def enter(self, module: nn.Module, name: str) -> None:
        """Puts the parameter and its shadow into their places."""
        if not self.is_at(module, name):
            self.places.append((weakref.ref(module), name))
        self._register(Registered.of(module), name)
        if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
            module._flat_weights[module._flat_weights_names.index(name)] = self.shadow
            module.__dict__["flatten_parameters"] = _leave_apart

    def _register(self, registered: Registered, name: str) -> None:
        registered.enter(name, self)

    def is_at(self, module: nn.Module, name: str) -> bool:
        return any(reference() is module and at == name for reference, at in self.places)

    def homes(self) -> list[tuple[nn.Module, str]]:
        """The places where it is read, or was until users put something else there for good."""
        places = [(reference(), name) for reference, name in self.places]
        return [(module, name) for module, name in places if module is not None and Registered.of(module).has(name, self)]

    def follow(self, module: nn.Module, name: str) -> None:
        """Takes over what users have registered in the parameter's place, if it is there to stay."""
        if Registered.of(module).is_exchanged(name):
            return
        self.shown.note_replacement()
        current = module._parameters[name]
        tied_to = sharded_behind(current)
        if tied_to is not None and tied_to is not self:
            self._give_way_to(tied_to, module, name)
            return
        if current is not self.parameter:
            self._take_over(self._accept(current, name))
        self._follow_handle()
        self.enter(module, name)

    def _give_way_to(self, other: "Sharded", module: nn.Module, name: str) -> None:
        """Users have put another one's parameter into this one's place before either was followed, as loaders do that tie
        at the end. This one stays in its unit."""
        if self.parameter.is_meta and not other.parameter.is_meta:
            self._take_over(self._accept(nn.Parameter(other.parameter.detach().clone(), self.parameter.requires_grad), name))
            self._follow_handle()
        other.enter(module, name)

    def _take_over(self, parameter: nn.Parameter) -> None:
        homes = self.homes()
        remember(parameter, self, former=self.parameter)
        self.parameter = parameter
        self.shown.set_parameter(parameter)
        for module, name in homes:
            self.enter(module, name)

    def heed_whole(self) -> None:
        """What users have set on the handle past all operators, ``requires_grad`` or ``data``, is the parameter's."""
        if not _C.is_as_registered(self.handle, self.parameter):
            _C.restore_handle(self.unit, self.handle)
            _C.follow_requires_grad(self.handle)

    def _follow_handle(self) -> None:
        """What the module's code asks of the handle before any operator, its dtype say, is the parameter's."""
        _C.restore_handle(self.unit, self.handle)
        _C.follow_requires_grad(self.handle)
        if self.parameter.is_meta:
            return
        self.handle.detach()  # an operator, before which the engine takes over new data; collective then
        self._show_handle_as_it_is()

    def _show_handle_as_it_is(self) -> None:
        """A DTensor around the handle is as the handle was when it was made."""
        if (self.handle.dtype, self.handle.requires_grad) != (self.shadow.dtype, self.shadow.requires_grad):
            self._show_handle()

    def show_handle_in(self, module: nn.Module, name: str) -> None:
        """A summoned one has the dtype of its shard."""
        self._show_handle_as_it_is()
        if name in module.__dict__:
            module.__dict__[name] = self.shadow
