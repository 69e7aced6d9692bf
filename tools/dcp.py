#!/usr/bin/env python3
"""Turns a checkpoint of libfsdp into a folder of torch.distributed.checkpoint (DCP), and back.

    python tools/dcp.py to-dcp runs/a converted      # a run's folder (its latest checkpoint), or one checkpoint
    python tools/dcp.py from-dcp folder runs/b       # becomes runs/b/step-00000000, or that of --step

One process does it, on the CPU, with one tensor in memory at a time. from-dcp needs room on the disk of the target for the
tensors once more, while it runs.

In DCP a checkpoint is {"model": ..., "optimizer": {"state": ..., "param_groups": ...}, **extra}, by the names that
torch.distributed.checkpoint.state_dict.get_state_dict gives; other keys of the first two are options. from-dcp also takes
optimizers that were saved with flatten_optimizer_state_dict. Hyper-parameters that C++ does not have are those that Python's
optimizer begins with (--optimizer). Random numbers are not converted.

DCP's files are pickles: convert only folders that you trust.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

import libfsdp

Tree = dict[str, Any]


class OnDemand(DefaultSavePlanner):
    """Reads a tensor, which is on the meta device in the state dict, when it is about to be written."""

    def __init__(self, read: Callable[[str], torch.Tensor], names: dict[str, str]):
        super().__init__(dedup_save_to_lowest_rank=True)
        self._read, self._names = read, names

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = self._names.get(index.fqn)
        return super().lookup_object(index) if name is None else self._read(name)

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = self.lookup_object(write_item.index)
        return self.transform_object(write_item, data)


def to_dcp(source: str, target: str, args: argparse.Namespace) -> None:
    checkpoint = libfsdp.SavedCheckpoint(source)
    state: Tree = {args.model_key: {}}
    names: dict[str, str] = {}  # of tensors that are read later, by their names in DCP
    if checkpoint.optimizer is not None:
        state[args.optimizer_key] = _optimizer_for_dcp(checkpoint.optimizer, args.optimizer)
    for name, tensor in checkpoint.tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            state[args.model_key][rest] = tensor
            names[f"{args.model_key}.{rest}"] = name
        elif kind == "optimizer":
            param, _, key = rest.rpartition("/")
            state[args.optimizer_key]["state"].setdefault(param, {})[key] = tensor
            names[f"{args.optimizer_key}.state.{param}.{key}"] = name
        elif kind == "extra":
            state[rest] = tensor
            names[rest] = name
    clash = [key for key in checkpoint.extra if key in state]
    if clash:
        raise SystemExit(f"extra has {clash}, which name other things there: choose other --model-key and --optimizer-key")
    state.update(checkpoint.extra)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target), planner=OnDemand(checkpoint.read, names), no_dist=True)
    print(f"{checkpoint.path} -> {target}")


def _optimizer_for_dcp(optimizer: Tree, kind: str) -> Tree:
    """With numbers in tensors where torch.optim has them in tensors, and all hyper-parameters."""
    defaults = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))]).defaults
    states = {
        name: {key: torch.tensor(float(value)) if type(value) in (int, float) else value for key, value in numbers.items()}
        for name, numbers in optimizer["state"].items()
    }
    return {"state": states, "param_groups": [{**defaults, **group} for group in optimizer["param_groups"]]}


def from_dcp(source: str, target: str, args: argparse.Namespace) -> None:
    reader = dcp.FileSystemReader(source)
    metadata = reader.read_metadata()
    os.makedirs(target, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".tmp-dcp-") as folder:
        flat: Tree = {}
        for name, stored in metadata.state_dict_metadata.items():
            is_tensor = isinstance(stored, TensorStorageMetadata)
            flat[name] = _on_disk(folder, len(flat), stored) if is_tensor else None
        dcp.load(flat, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        state = _nested(flat, metadata.planner_data or {})
        if args.model_key not in state:
            raise SystemExit(f"{source} has {sorted(map(str, state))}, and no '{args.model_key}': name the model by --model-key")
        model = _module_of(state.pop(args.model_key))
        optimizer = _optimizer_of(state.pop(args.optimizer_key, None), model)
        print(f"{source} -> {libfsdp.save(target, model, optimizer, step=args.step, extra=_plain_extra(state))}")


def _on_disk(folder: str, number: int, stored: TensorStorageMetadata) -> torch.Tensor:
    """A tensor whose memory is a file, which the system writes out as it needs to."""
    numel, dtype = stored.size.numel(), stored.properties.dtype
    if numel < 1024:
        return torch.empty(stored.size, dtype=dtype)
    return torch.from_file(f"{folder}/{number}", shared=True, size=numel, dtype=dtype).view(stored.size)


def _nested(flat: Tree, paths: dict[str, tuple]) -> Tree:
    """As it was before DCP flattened it; lists are dictionaries of numbers."""
    nested: Tree = {}
    for name, value in flat.items():
        *above, last = paths.get(name, (name,))
        place = nested
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return nested


def _module_of(tensors: Tree) -> nn.Module:
    """A module that has these, by their names."""
    root = nn.Module()
    for path, tensor in tensors.items():
        module = root
        *above, name = path.split(".")
        for key in above:
            if key not in module._modules:
                module.add_module(key, nn.Module())
            module = module._modules[key]
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return root


class _Optimizer(torch.optim.Optimizer):
    """Has a state, and makes no steps."""

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def _optimizer_of(saved: Tree | None, model: nn.Module) -> torch.optim.Optimizer | None:
    if saved is None:
        return None
    params = dict(model.named_parameters())
    states, groups = _unflattened(saved, list(params)) if "state" not in saved else (saved["state"], saved["param_groups"])
    groups = list(groups.values()) if isinstance(groups, dict) else groups
    unknown = [name for group in groups for name in group["params"] if name not in params]
    if unknown:
        raise SystemExit(f"the optimizer has {unknown}, which the model has not: save it by get_optimizer_state_dict, by name")
    optimizer = _Optimizer([{**group, "params": [params[name] for name in group["params"]]} for group in groups], {})
    for name, state in states.items():
        optimizer.state[params[name]] = state
    return optimizer


def _unflattened(saved: Tree, params: list[str]) -> tuple[Tree, list[Tree]]:
    """Of flatten_optimizer_state_dict, which tells hyper-parameters of each parameter: those that share all are a group."""
    states: Tree = {}
    options: dict[str, Tree] = {}
    for name, value in saved.items():
        kind, _, rest = name.partition(".")
        param = max((param for param in params if rest.startswith(param + ".")), key=len, default=None)
        if param is None:
            raise SystemExit(f"the optimizer has '{name}', of no parameter of the model")
        of_kind = states if kind == "state" else options
        of_kind.setdefault(param, {})[rest.removeprefix(param + ".")] = value
    groups: list[Tree] = []
    for param, own in options.items():
        group = next((each for each in groups if {**each, "params": None} == {**own, "params": None}), None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append(param)
    return states, groups


def _plain_extra(state: Tree) -> Tree:
    """What a checkpoint of libfsdp takes; a warning names what it does not."""
    extra = {}
    for name, value in state.items():
        if isinstance(value, (torch.Tensor, *_PLAIN)) and (isinstance(value, torch.Tensor) or _is_plain(value)):
            extra[str(name)] = value
        else:
            print(f"warning: '{name}' ({type(value).__name__}) is left out: it is no number, text or tensor", file=sys.stderr)
    return extra


_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("to-dcp", "from-dcp"))
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--model-key", default="model", help="of the model, in DCP (default: model)")
    parser.add_argument("--optimizer-key", default="optimizer", help="of the optimizer, in DCP (default: optimizer)")
    parser.add_argument("--optimizer", default="AdamW", help="to-dcp: its class in torch.optim (default: AdamW)")
    parser.add_argument("--step", type=int, default=0, help="from-dcp: that the checkpoint is of (default: 0)")
    args = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        (to_dcp if args.direction == "to-dcp" else from_dcp)(args.source, args.target, args)


if __name__ == "__main__":
    main()
