"""What the keys of an optimizer's state dict stand for: its parameters by number, or by name."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._registered import Registered, sharded_behind
from ._pytorch import clean_tensor_name
from .flat import Flat, Part
from .plain import PlainSharded

Key = int | str
Originals = dict[str, PlainSharded | Part | None]
"""What a parameter stands for in the unwrapped model, by first names: itself, or, if it is flat, several."""
OptimizerInput = Iterable[nn.Parameter] | list[dict[str, Any]] | None


def originals_of(model: nn.Module) -> dict[nn.Parameter, Originals]:
    """Of each parameter that is registered, also of one that no wrapper shards."""
    originals: dict[nn.Parameter, Originals] = {}
    seen: set[PlainSharded | Part | nn.Parameter] = set()
    for path, module in model.named_modules():
        registered = module._parameters
        for name, tensor in registered.slots() if isinstance(registered, Registered) else registered.items():
            sharded = sharded_behind(tensor)
            if tensor is None or isinstance(sharded, Flat) or (sharded or tensor) in seen:
                continue
            seen.add(sharded or tensor)
            param = tensor if sharded is None else sharded.parameter
            originals.setdefault(param, {})[clean_tensor_name(f"{path}.{name}" if path else name)] = sharded
    return originals


def keys_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimizerInput, by_name: bool
) -> dict[nn.Parameter, Key]:
    """Under which key an optimizer's state dict has a parameter. ``by_name``: TorchRec's, or ``_NamedOptimizer``'s."""
    if by_name:
        registered = {param: name for name, param in model.named_parameters()}
        return {param: registered[param] for group in optim.param_groups for param in group["params"]}
    if optim_input is None and optim is not None:
        optim_input = optim.param_groups
    params = list(model.parameters()) if optim_input is None else _params_in(optim_input)
    return {param: number for number, param in enumerate(params)}


def is_by_name(optim_state_dict: dict[str, Any]) -> bool:
    listed = [key for group in optim_state_dict.get("param_groups", []) for key in group["params"]]
    return isinstance(next(iter(listed or optim_state_dict.get("state", {})), None), str)


def warn_optim_input(optim_input: OptimizerInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from your "
            "code without changing its functionality.",
            FutureWarning,
            stacklevel=4,
        )


def _params_in(optim_input: OptimizerInput) -> list[nn.Parameter]:
    """Of what an optimizer is made of: parameters, or groups of them."""
    if isinstance(optim_input, torch.Tensor) or not isinstance(optim_input, Iterable):
        raise TypeError(f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}")
    given = list(optim_input)
    if not given:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(each, torch.Tensor) for each in given):
        return given
    if not all(isinstance(each, dict) for each in given):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    return [param for group in given for param in group["params"]]
