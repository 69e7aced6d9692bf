"""What an optimizer has of a wrapper's parameters: states of parts, put together, and cut into parts again."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from .. import _C
from .flat import Part
from .plain import PlainSharded
from .sharded_values import rows_of, whole_of

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel

State = dict[str, Any]
Sharded = PlainSharded | Part


def is_cut(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


@dataclasses.dataclass(frozen=True)
class Cut:
    """Stands for a tensor that is cut as its parameter is."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Outline:
    """The state that one rank has of a parameter, without what is put together of several."""

    has_elements: bool
    fits: bool
    entries: State

    @staticmethod
    def of(sharded: Sharded, state: State) -> "Outline":
        shapes = {value.shape for value in state.values() if is_cut(value)}
        entries = {name: Cut(value.dtype) if is_cut(value) else _on_host(value) for name, value in state.items()}
        return Outline(sharded.piece.numel() > 0, shapes <= {sharded.piece.shape}, entries)


def whole_states(
    wrapper: "FullyShardedDataParallel",
    own: dict[str, Sharded],
    states: dict[str, State],
    in_rows: bool,
    offload_to_cpu: bool,
    wanted: bool,
) -> dict[str, State]:
    """Of a wrapper's parameters by name, whole or in rows. Collective: once for each kind of state. A rank that does not want
    them keeps none."""
    outlines = [Outline.of(sharded, states.get(name, {})) for name, sharded in own.items()]
    is_cut = wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD
    of_ranks = _exchanged(outlines, wrapper.process_group) if is_cut else [outlines]
    merged = {name: _merged(name, each) for name, each in zip(own, zip(*of_ranks, strict=True), strict=True)}
    in_rows = in_rows and is_cut
    device = torch.device("cpu") if offload_to_cpu and not in_rows else wrapper.compute_device
    for kind in dict.fromkeys(kind for state in merged.values() for kind in state):
        names = [name for name, state in merged.items() if isinstance(state.get(kind), Cut)]
        pieces = [(own[name].handle, _piece(own[name], states.get(name, {}), kind, merged[name][kind])) for name in names]
        wholes = dict(zip(names, _C.full_tensors(pieces, device), strict=True))
        if not wanted:
            wholes.clear()
        for name, whole in wholes.items():
            merged[name][kind] = rows_of(whole, wrapper, offload_to_cpu) if in_rows else whole
    return {name: state for name, state in merged.items() if state and wanted}


def part_of_state(sharded: Sharded, name: str, state: State, wrapper: "FullyShardedDataParallel") -> State:
    """This rank's part of a parameter's state. Collective if the state is in rows."""
    part: State = {}
    for kind, value in state.items():
        if not is_cut(value):
            part[kind] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        whole = whole_of(value, wrapper)
        if whole.shape != sharded.shape:
            raise ValueError(
                f"Tensor optimizer state does not have same shape as its parameter: '{kind}' of '{name}' has {whole.shape}, "
                f"and the parameter {sharded.shape}"
            )
        part[kind] = _C.piece_of(sharded.handle, whole)
    return part


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _piece(sharded: Sharded, state: State, kind: str, cut: Cut) -> torch.Tensor:
    """A rank without state, since it has no element of the parameter, takes part."""
    return state[kind] if kind in state else torch.zeros_like(sharded.piece, dtype=cut.dtype)


def _exchanged(outlines: list[Outline], group: dist.ProcessGroup) -> list[list[Outline]]:
    """By their order: ranks may ignore different modules, whose numbers others do without."""
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, outlines, group)
    return of_ranks


def _merged(name: str, outlines: Sequence[Outline]) -> State:
    """What ranks without elements of a parameter say of it does not count: nobody updates it there."""
    counted = [each for each in outlines if each.has_elements] or outlines
    present = [each.entries for each in counted if each.entries]
    if not present:
        return {}
    if len(present) < len(counted):
        ranks = [rank for rank, each in enumerate(outlines) if each.has_elements and not each.entries]
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some "
            f"ranks are missing some of those states: there is one of '{name}', but ranks {ranks} of its process group have "
            "none of their parts of it. Give the optimizers of all ranks the same parameters"
        )
    if not all(each.fits for each in counted):
        raise ValueError(
            f"Tensor optimizer state does not have same shape as its parameter: of '{name}' it is not of one element for "
            "each element of the parameter, and cannot be put together"
        )
    for other in present[1:]:
        _check_same(name, present[0], other)
    return dict(present[0])


def _check_same(name: str, state: State, other: State) -> None:
    for kind in {**state, **other}:
        a, b = state.get(kind), other.get(kind)
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
        if not same:
            raise RuntimeError(f"Ranks have different values of the optimizer state '{kind}' of '{name}': {a} and {b}")
