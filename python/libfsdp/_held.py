"""What this rank has of each tensor of a model, by the names of the unsharded one: of a model that ``fully_shard`` or
``FullyShardedDataParallel`` has sharded, of one whose parameters are other ``DTensor``s, or of a plain one."""

import dataclasses
import math
import re
import warnings
from collections.abc import Container, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from . import _C
from ._fsdp1._pytorch import clean_tensor_name, is_fsdp_flattened
from ._fsdp1.buffers import saved_dtype
from ._fsdp1.flat import Part
from ._registered import Registered, is_flat, sharded_behind
from ._sharded import Sharded
from ._sharded_dtensor import DTensorSharded
from ._state import states_below


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """A parameter or buffer under one of its names."""

    name: str
    tensor: torch.Tensor  # as optimizers have it: a parameter, or the flat one in which it is a part
    held: _C.HeldTensor
    part: Part | None = None  # of a flat parameter
    is_buffer: bool = False


def named_tensors(model: nn.Module, to_write: bool = False, ranks: Container[int] | None = None) -> list[Named]:
    """In the order of the modules, each module's parameters before its buffers; a tied one is there under each of its
    names. ``to_write``: values come into them. ``ranks``: those that write a file, if not all. Collective where users have
    registered other parameters."""
    for state in states_below(model):
        if not state.intact():
            state.follow()
    held: dict[int, _C.HeldTensor] = {}  # tied ones are one
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _parameters(module):
            full_name = _clean(path, name)
            sharded = sharded_behind(tensor)
            key = id(sharded or tensor)
            if key not in held:
                held[key] = _held_parameter(full_name, tensor, sharded, ranks)
            if isinstance(sharded, Part):
                found.append(Named(full_name, sharded.parameter, held[key], sharded))
            else:
                found.append(Named(full_name, sharded.parameter if sharded else tensor, held[key]))
        for name, buffer in _buffers(module):
            if id(buffer) not in held:
                held[id(buffer)] = _held_buffer(buffer, to_write, ranks)
            found.append(Named(_clean(path, name), buffer, held[id(buffer)], is_buffer=True))
        _warn_of_extra_state(path, module)
    return found


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    registered = module._parameters
    if not isinstance(registered, Registered):
        yield from ((name, tensor) for name, tensor in registered.items() if tensor is not None)
        return
    for name, tensor in registered.slots():
        sharded = registered.hidden.get(name) or registered.sharded.get(name)
        expected = None if sharded is None else sharded.handle if name in registered.hidden else sharded.parameter
        if sharded is not None and tensor is not expected and name in registered and registered[name] is not expected:
            raise _C.Error(
                f"[state] another tensor is in the place of '{name}' of a {type(module).__name__} for a while: end "
                "summon_full_params or functional_call first"
            )
        if tensor is not None and not is_flat(tensor):
            yield name, tensor


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _clean(path: str, name: str) -> str:
    return re.sub(r"(?<![^.])_orig_mod\.", "", clean_tensor_name(f"{path}.{name}" if path else name))


def _held_parameter(
    name: str, tensor: torch.Tensor, sharded: Sharded | None, ranks: Container[int] | None
) -> _C.HeldTensor:
    if sharded is not None and sharded.is_extended or _is_subclass(tensor):
        raise _C.Error(
            f"[state] '{name}' is a tensor subclass, whose parts have no names in files: use torch.distributed.checkpoint, "
            "which pickles them"
        )
    if is_fsdp_flattened(tensor):
        raise _C.Error(
            f"[state] '{name}' was cut by PyTorch's FullyShardedDataParallel, and does not say which elements are here: wrap the "
            "model with libfsdp.FullyShardedDataParallel, or use torch.distributed.checkpoint"
        )
    if sharded is not None and sharded.around is None:
        return _C.held_behind(sharded.handle)
    if sharded is not None:
        _C.held_behind(sharded.handle)  # what was written to the handle is in the shard
    return _held_dtensor(name, tensor, ranks, sharded) if isinstance(tensor, DTensor) else _C.held_behind(tensor)


def _is_subclass(tensor: torch.Tensor) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer)


def _held_buffer(buffer: torch.Tensor, to_write: bool, ranks: Container[int] | None) -> _C.HeldTensor:
    if isinstance(buffer, DTensor):
        return _held_dtensor("buffer", buffer, ranks)
    return _C.held_behind(buffer if to_write else buffer.to(saved_dtype(buffer)))


def _held_dtensor(
    name: str, tensor: DTensor, ranks: Container[int] | None, sharded: Sharded | None = None
) -> _C.HeldTensor:
    """Whoever has cut it, along whatever dimensions of its mesh."""
    placements, local = tensor.placements, tensor._local_tensor
    if any(placement.is_partial() for placement in placements):
        raise _C.Error(f"[state] '{name}' is a sum that is not added up yet ({placements}): redistribute it first")
    if isinstance(sharded, DTensorSharded):
        shape, offset = sharded.layout.block(tensor.shape)
    else:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    if tuple(shape) != tuple(local.shape) and max(math.prod(shape), local.numel()) > 0:
        raise _C.Error(
            f"[state] '{name}', of sizes {list(tensor.shape)}, is placed as {placements}, by which this rank has sizes "
            f"{list(shape)}, and has {list(local.shape)}: choose sizes that all these ranks divide, or cut with "
            "libfsdp.fully_shard"
        )
    strides = _contiguous_strides(tensor.shape)
    extent = _extent(name, tensor.shape, tuple(shape), tuple(offset))
    return _C.held_piece((list(tensor.shape), strides), extent, local, _is_first(tensor, ranks))


def _is_first(tensor: DTensor, ranks: Container[int] | None) -> bool:
    """Of the ranks that have these elements: also of those along dimensions of the mesh that the tensor's was taken from."""
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    root, dims = mesh._get_root_mesh(), range(mesh.ndim)
    if names and set(names) <= set(root.mesh_dim_names or ()):
        dims = [root.mesh_dim_names.index(name) for name in names]
    else:
        root = mesh
    if root.get_coordinate() is None:
        return False
    cut = {dim for dim, placement in zip(dims, tensor.placements, strict=True) if not placement.is_replicate()}
    alike = tuple(place if dim in cut else slice(None) for dim, place in enumerate(root.get_coordinate()))
    writers = (rank for rank in root.mesh[alike].flatten().tolist() if ranks is None or rank in ranks)
    return dist.get_rank() == min(writers, default=None)


def _contiguous_strides(sizes: torch.Size) -> list[int]:
    return [math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes))]


def _extent(name: str, sizes: torch.Size, shape: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Of a block: equal runs at equal distances, in the order of a contiguous whole."""
    if math.prod(shape) == 0:
        return 0, 0, 0, 0
    strides = _contiguous_strides(sizes)
    first = sum(begin * stride for begin, stride in zip(offset, strides, strict=True))
    cut = [dim for dim in range(len(sizes)) if shape[dim] != sizes[dim]]
    if not cut:
        return 0, math.prod(shape), math.prod(shape), 1
    last = cut[-1]
    run, stride = shape[last] * strides[last], sizes[last] * strides[last]
    if len(cut) > 2 or (len(cut) == 2 and math.prod(sizes[: cut[0]]) != 1):
        raise _C.Error(
            f"[state] '{name}', of sizes {list(sizes)}, is cut along dimensions {cut}: what a rank has of it are no runs "
            "at equal distances. Use torch.distributed.checkpoint"
        )
    return first, run, stride, math.prod(shape[:last])


def _warn_of_extra_state(path: str, module: nn.Module) -> None:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        warnings.warn(
            f"'{path}', a {type(module).__name__}, has a get_extra_state(), which is not saved with its tensors: give it to "
            "save as a value of extra",
            stacklevel=2,
        )
