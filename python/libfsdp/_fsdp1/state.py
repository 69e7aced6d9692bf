"""What a wrapper keeps of its unit, and how wrappers are found."""

import contextlib
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import MixedPrecision

from .. import _C
from .._policy import MixedPrecisionPolicy
from .._state import FSDPState, state_of
from .._summon import Slot, Whole, take_assigned
from .device import Place
from .plain import Calls

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel


class WrapperState(FSDPState):
    """Of one wrapper. Inputs are cast by the wrapper itself, as its place in the model asks for."""

    def __init__(self, unit: _C.Unit, place: Place, calls: Calls):
        super().__init__(unit, {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}, [place])
        self.calls = calls
        self._loading = contextlib.ExitStack()

    def begin_loading(self, guard: contextlib.AbstractContextManager[dict[Slot, Whole]]) -> None:
        """Its whole parameters are in the places of parameters until the end."""
        self._loading.callback(take_assigned, self._loading.enter_context(guard))

    def end_loading(self) -> None:
        """Also of what an exception has broken off."""
        self._loading.close()

    def follow(self, called: nn.Module | None = None) -> None:
        self.end_loading()
        super().follow(called)

    def heed(self) -> None:
        """Takes over what users have put in the places of parameters since the last call. Collective where they have."""
        if not self.intact():
            self.follow()

    @property
    def is_root(self) -> bool:
        return _C.is_root(self.unit)


def engine_policy(policy: MixedPrecision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype or policy.param_dtype,
        cast_forward_inputs=False,
    )


def is_wrapper(module: nn.Module) -> bool:
    return isinstance(state_of(module), WrapperState)


def instances_below(module: nn.Module) -> "list[FullyShardedDataParallel]":
    """In the order of ``module.modules()``."""
    return [each for each in module.modules() if is_wrapper(each)]


def roots_below(module: nn.Module) -> "list[FullyShardedDataParallel]":
    """Those that no other below ``module`` contains."""
    roots, inner = [], set()
    for instance in instances_below(module):
        if instance not in inner:
            roots.append(instance)
            inner.update(instances_below(instance))
    return roots
