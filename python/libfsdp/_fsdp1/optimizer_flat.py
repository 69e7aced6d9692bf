"""States of flat parameters, as states of the parameters that these consist of, and back."""

from typing import Any

import torch

from .flat import Flat, Part
from .optimizer_states import State, is_cut


def split(flat: Flat, parts: dict[str, Part], state: State) -> dict[str, State]:
    """What is not cut as the flat parameter is, is each part's."""
    return {
        name: {kind: _within(flat, part, value) if is_cut(value) else value for kind, value in state.items()}
        for name, part in parts.items()
    }


def join(flat: Flat, parts: dict[str, Part], states: dict[str, State]) -> State:
    """Parts without state count as zeros, where their state is a tensor; all else has to be the same for all."""
    given = [states[name] for name in parts if states.get(name)]
    if any(state.keys() != given[0].keys() for state in given):
        raise ValueError(
            f"Differing optimizer state names for the unflattened parameters {list(parts)}, which are one flat parameter: "
            f"{[sorted(state) for state in given]}"
        )
    return {kind: _joined(flat, parts, kind, states) for kind in (given[0] if given else {})}


def _joined(flat: Flat, parts: dict[str, Part], kind: str, states: dict[str, State]) -> Any:
    values = {name: states.get(name, {}).get(kind) for name in parts}
    present = [value for value in values.values() if value is not None]
    if not present:
        return None
    if len({(type(value), is_cut(value)) for value in present}) > 1:
        raise ValueError(f"Differing optimizer state types for state {kind}, values {present}, of {list(parts)}")
    if not is_cut(present[0]):
        return _common(kind, values)
    if len({value.dtype for value in present}) > 1:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have positive-dimension tensor state with "
            f"the same dtype but got dtypes {[value.dtype for value in present]} for state {kind} and {list(parts)}"
        )
    joined = torch.zeros(flat.parameter.shape, dtype=present[0].dtype, device=flat.parameter.device)
    for name, value in values.items():
        if value is not None:
            _within(flat, parts[name], joined).copy_(value)
    return joined


def _common(kind: str, values: dict[str, Any]) -> Any:
    """Of parameters that are updated as one."""
    told = [(value.item(), value.dtype) if isinstance(value, torch.Tensor) else value for value in values.values()]
    if any(each != told[0] for each in told):
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and "
            f"dtype but got {told} for state {kind} and {list(values)}"
        )
    return next(iter(values.values()))


def _within(flat: Flat, part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """A part's elements in a tensor that is cut as the flat parameter is."""
    piece = part.piece
    if tensor.shape != flat.parameter.shape or piece.numel() == 0:
        return tensor if piece.numel() > 0 else tensor.new_empty(piece.shape)
    begin = (piece.data_ptr() - flat.parameter.data_ptr()) // piece.element_size()
    return tensor.as_strided(piece.shape, piece.stride(), tensor.storage_offset() + begin)
