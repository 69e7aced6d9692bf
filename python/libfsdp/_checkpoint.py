"""Checkpoints on disk, and weights for other programs: the files of the C++ library."""

import dataclasses
import functools
import multiprocessing
import multiprocessing.util
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import _C
from ._callbacks import Callbacks
from ._held import Named, named_tensors
from ._mesh import group_of, group_of_one
from ._optimizer_by_name import OptimizerByName, StateByName
from ._state import states_below

Path = str | os.PathLike[str]
Group = dist.ProcessGroup | None
NameInFiles = Callable[[str], str] | None
TransposedInFiles = Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class LoadedState:
    """What ``load`` says of a checkpoint."""

    path: str
    step: int
    extra: dict[str, Any]
    missing_keys: list[str]  # of the model, unless ``strict``
    unexpected_keys: list[str]


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: dict[str, Any] | None = None,
    keep_last: int = 0,
    block_bytes: int = 1 << 20,
    process_group: Group = None,
) -> str:
    """Writes the checkpoint FOLDER/step-NNNNNNNN, and returns its path: the model, sharded or not, the optimizer, the random
    number generators, and ``extra`` of the first rank: numbers, texts, None, tensors, and lists, tuples and dictionaries of
    numbers and texts, such as a scheduler's ``state_dict()``.

    Each rank writes what it has. The checkpoint appears when all of it is on the disk; whatever happens before, those that
    are there stay. ``keep_last``: how many of them, 0 for all. An error on one rank is a ``libfsdp.Error`` on all.
    Collective, on the ranks of ``process_group``, or all.
    """
    _check_arguments(model, optimizer, extra, step, keep_last)
    device = _device_of(model)
    state = _state_of(model, optimizer, extra, device, process_group)
    with Callbacks() as called:
        return _C.save(os.fspath(folder), step, called(state), keep_last, block_bytes, _group(process_group, device))


class PendingSave:
    """A checkpoint that is being written while the program goes on. When nothing holds it any more, it waits for what this
    rank writes; an error that nobody has asked for is then a warning."""

    def __init__(self, save: _C.PendingSave):
        self._save = save

    def done(self) -> bool:
        """Whether this rank is done with it. Communicates nothing."""
        return self._save.done()

    def wait(self) -> str:
        """The checkpoint's path, once it is there. An error on one rank is a ``libfsdp.Error`` on all. Collective."""
        return self._save.wait()


def save_async(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: dict[str, Any] | None = None,
    keep_last: int = 0,
    block_bytes: int = 1 << 20,
    max_staged_bytes: int | None = None,
    keep_staging_memory: bool = True,
    process_group: Group = None,
) -> PendingSave:
    """As ``save``, but returns once parameters are copied, and what torch writes to the optimizer's states does not reach the
    save: what is saved is what is there at the call. The checkpoint appears when all ranks have written theirs, whether or not
    anybody waits; another save or load of the same ranks waits for it first. Of the part, no more than ``max_staged_bytes``
    are copied; tensors beyond that are written before this returns. The memory of the copies stays for the next ones, unless
    ``keep_staging_memory`` is false. Collective."""
    _check_arguments(model, optimizer, extra, step, keep_last)
    device = _device_of(model)
    group = _group(process_group, device)
    staging = max_staged_bytes, keep_staging_memory
    _wait_at_the_end_of(os.getpid())
    with Callbacks() as called:
        state = called(_state_of(model, optimizer, extra, device, process_group))
        return PendingSave(_C.save_async(os.fspath(folder), step, state, keep_last, block_bytes, *staging, group))


@functools.cache
def _wait_at_the_end_of(process: int) -> None:
    """Children that ``multiprocessing`` forks end with ``_exit``, which calls nothing but these."""
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _C.wait_for_all_saves, exitpriority=0)


def latest(folder: Path) -> str | None:
    """The path of the checkpoint of the highest step."""
    return _C.latest(os.fspath(folder))


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    random_numbers: bool = True,
    process_group: Group = None,
) -> LoadedState:
    """From a checkpoint, or the latest in a run's folder, into a model and an optimizer however they are sharded, or not at
    all, on any number of ranks. Each rank reads what it needs. Nothing changes if there is an error, which is a
    ``libfsdp.Error`` on all ranks. ``random_numbers``: the generators of torch go on where they were. Collective."""
    _check_arguments(model, optimizer)
    device = _device_of(model)
    group = _group(process_group, device)
    with Callbacks() as called:
        target = _Target(model, optimizer).within(called)
        loaded = _C.load(os.fspath(folder), target, optimizer is not None, device, strict, random_numbers, group)
    return LoadedState(loaded.path, loaded.step, loaded.extra, loaded.keys.missing, loaded.keys.unexpected)


def export_safetensors(
    folder: Path,
    model: nn.Module,
    *,
    max_shard_bytes: int = 5_000_000_000,
    name_in_files: NameInFiles = None,
    transposed: TransposedInFiles = None,
    process_group: Group = None,
) -> None:
    """Writes FOLDER/model.safetensors, or numbered files with an index, as the Hugging Face libraries read them. Each rank
    writes what it has to its places: nothing is gathered. ``name_in_files`` is given a tensor's name in the model;
    ``transposed`` too, and says whether rows and columns are exchanged in the files. Collective."""
    group = _group(process_group, _device_of(model))
    with Callbacks() as called:
        name, turned = name_in_files and called(name_in_files), transposed and called(transposed)
        source = _Target(model, to_write=False, ranks=_ranks(process_group)).within(called)
        _C.export_safetensors(os.fspath(folder), source, max_shard_bytes, name, turned, group)


def import_safetensors(
    path: Path,
    model: nn.Module,
    *,
    strict: bool = True,
    name_in_files: NameInFiles = None,
    transposed: TransposedInFiles = None,
    process_group: Group = None,
) -> nn.modules.module._IncompatibleKeys:
    """Reads such a folder, or one file, into a model, sharded or not: each rank its elements, whose dtype becomes the
    model's. A tied weight has to be there under one of its names. Collective."""
    group = _group(process_group, _device_of(model))
    with Callbacks() as called:
        name, turned = name_in_files and called(name_in_files), transposed and called(transposed)
        target = _Target(model).within(called)
        keys = _C.import_safetensors(os.fspath(path), target, strict, name, turned, group)
    return nn.modules.module._IncompatibleKeys(keys.missing, keys.unexpected)


class _Target:
    """What values that are read go into. Its methods are called one after another, on all ranks alike."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        to_write: bool = True,
        ranks: list[int] | None = None,
    ):
        self._model, self._optimizer, self._to_write, self._ranks = model, optimizer, to_write, ranks
        self._named: dict[str, Named] = {}
        self._read: list[tuple[str, _C.HeldTensor]] = []
        self._state: dict[str, Any] | None = None

    def within(self, called: Callbacks) -> types.SimpleNamespace:
        """What C++ asks."""
        names = ("model", "prepare", "take_over")
        return types.SimpleNamespace(**{name: called(getattr(self, name)) for name in names})

    def model(self) -> list[tuple[str, _C.HeldTensor]]:
        self._named = {each.name: each for each in named_tensors(self._model, self._to_write, self._ranks)}
        return [(name, each.held) for name, each in self._named.items()]

    def prepare(self, read: list[tuple[str, _C.HeldTensor]], optimizer: StateByName | None) -> None:
        self._read = read
        if optimizer is not None:
            self._state = OptimizerByName(self._optimizer, self._named.values()).made(optimizer)

    def take_over(self) -> None:
        for name, held in self._read:
            _C.copy_elements(held, self._named[name].held)
        if self._state is not None:
            self._optimizer.load_state_dict(self._state)


def _check_arguments(
    model: nn.Module, optimizer: Any, extra: Any = None, step: Any = 0, keep_last: Any = 0
) -> None:
    expected = (
        ("model", model, nn.Module),
        ("optimizer", optimizer, (torch.optim.Optimizer, type(None))),
        ("extra", extra, (dict, type(None))),
    )
    for name, value, kinds in expected:
        if not isinstance(value, kinds):
            kind = "a module" if name == "model" else "a dictionary" if name == "extra" else "an optimizer"
            raise TypeError(f"{name} has to be {kind}, and is {type(value)}")
    for name, value in (("step", step), ("keep_last", keep_last)):
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} has to be a whole number, and is {value!r}")


def _state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    device: torch.device,
    process_group: Group,
) -> Callable[[], _C.StateOfRank]:
    def state() -> _C.StateOfRank:
        named = named_tensors(model, ranks=_ranks(process_group))
        by_name = None if optimizer is None else OptimizerByName(optimizer, named).state()
        return _C.StateOfRank([(each.name, each.held) for each in named], by_name, extra or {}, device)

    return state


def _device_of(model: nn.Module) -> torch.device:
    """On which it is trained."""
    states = states_below(model)
    if states:
        return states[0].device
    tensor = next(iter(model.parameters()), None)
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device


def _group(process_group: Group, device: torch.device) -> _C.Group:
    if process_group is None:
        process_group = dist.group.WORLD if dist.is_initialized() else None
    return group_of_one() if process_group is None else group_of(process_group, device)


def _ranks(process_group: Group) -> list[int] | None:
    """None: all."""
    return None if process_group is None else dist.get_process_group_ranks(process_group)
