"""Parameters and modules that a wrapper is told to leave alone."""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._composable import applied_to
from .._registered import sharded_behind
from .state import instances_below, is_wrapper


@dataclasses.dataclass
class Ignored:
    modules: set[nn.Module]
    params: set[nn.Parameter]

    @property
    def buffers(self) -> set[torch.Tensor]:
        return {buffer for module in self.modules for buffer in module.buffers()}

    @staticmethod
    def of(module: nn.Module, ignored_modules: Iterable | None, ignored_states: Iterable | None) -> "Ignored":
        if ignored_modules is not None and ignored_states is not None:
            raise ValueError(
                "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
            )
        params: list[nn.Parameter] = []
        if ignored_states is not None:
            ignored_states = list(ignored_states)
            _check_types(ignored_states, "ignored_states expects all nn.Parameter or all nn.Module list", True)
            if ignored_states and isinstance(ignored_states[0], nn.Parameter):
                params = ignored_states
            else:
                ignored_modules = ignored_states
        modules = _modules(module, ignored_modules)
        inner = [instance._ignored for instance in instances_below(module)]
        own = {each for ignored in modules for each in ignored.parameters()} | set(params)
        own = {each for each in own if sharded_behind(each) is None}
        return Ignored(modules.union(*(each.modules for each in inner)), own.union(*(each.params for each in inner)))


def _check_types(elements: list[Any], expected: str, params_too: bool) -> None:
    kinds = (nn.Module, nn.Parameter) if params_too else (nn.Module,)
    if not any(all(isinstance(each, kind) for each in elements) for kind in kinds):
        types = sorted({type(each) for each in elements}, key=repr)
        raise ValueError(f"{expected} elements but got types {types}")


def _modules(root: nn.Module, ignored_modules: Iterable | None) -> set[nn.Module]:
    try:
        given = list(ignored_modules) if ignored_modules is not None else []
    except TypeError as error:
        raise TypeError(
            f"`ignored_modules` should be an iterable of `torch.nn.Module`s but got {type(ignored_modules)}"
        ) from error
    _check_types(given, "ignored_modules expects nn.Module list", False)
    if any(is_wrapper(each) for each in given):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    given += [module for module in root.modules() if "replicate" in applied_to(module)]
    ignored = {child for module in given for child in module.modules() if not is_wrapper(child)}
    if root in ignored:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters "
            f"being ignored and is not well-supported: {root}",
            stacklevel=4,
        )
    return ignored
