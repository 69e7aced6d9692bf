"""Where a wrapper's own parameters and buffers are, by the names that the unwrapped model has."""

from collections.abc import Iterator

import torch
from torch import nn

from .._registered import Registered
from ._pytorch import clean_tensor_name
from .flat import Part
from .plain import PlainSharded
from .state import is_wrapper


def own_modules(wrapper: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """From what is wrapped down to the wrappers below; one that is there twice under each of its names."""
    todo = [("", wrapper._fsdp_wrapped_module)]
    while todo:
        prefix, module = todo.pop()
        if is_wrapper(module):
            continue
        yield prefix, module
        todo.extend((f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None)


def own_params(wrapper: nn.Module) -> Iterator[tuple[str, nn.Module, str, PlainSharded | Part]]:
    for prefix, module in own_modules(wrapper):
        registered = module._parameters
        if not isinstance(registered, Registered):
            continue
        for name, sharded in registered.sharded.items():
            if isinstance(sharded, PlainSharded) and registered.get(name) is not None:
                yield clean_tensor_name(prefix + name), module, name, sharded
        for name, sharded in registered.hidden.items():
            yield clean_tensor_name(prefix + name), module, name, sharded


def own_buffers(wrapper: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in own_modules(wrapper):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield clean_tensor_name(prefix + name), buffer
