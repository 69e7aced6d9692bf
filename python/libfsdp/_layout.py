"""On which mesh, and how, a sharded parameter lies: data parallel dimensions together with those it had before."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard

from . import _C
from ._around import Around
from ._mesh import device_of, engine_mesh
from ._policy import DataParallelMeshDims


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Layout:
    """How one sharded parameter lies."""

    mesh: DeviceMesh  # of its shards
    placements: Placements
    around: Around | None  # the whole, for the module's own code; None: nothing
    cut: int | None  # the dimension of `mesh` along which the engine cuts what the module's own code reads

    def block(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and place of this rank's elements, of a parameter that was a DTensor before: uneven cuts of cuts are not
        where the placements have them."""
        sizes, offset = compute_local_shape_and_global_offset(shape, self.around.mesh, self.around.placements)
        if self.cut is None:
            return tuple(sizes), tuple(offset)
        dim, rank = self.placements[self.cut].dim, self.mesh.get_coordinate()[self.cut]
        chunk = -(-sizes[dim] // self.mesh.size(self.cut))
        first = min(rank * chunk, sizes[dim])
        rows = min(chunk, sizes[dim] - first)
        return _with(sizes, dim, rows), _with(offset, dim, offset[dim] + first)


@dataclass(frozen=True)
class DataParallel:
    """The data parallel dimensions that ``fully_shard`` was given."""

    mesh: DeviceMesh  # (shard) or (replicate, shard); with `spmd`, what is left of that one
    engine: _C.Mesh
    spmd: DeviceMesh | None = None  # the whole mesh on which parameters are DTensors already
    dims: DataParallelMeshDims | None = None
    result: DeviceMesh | None = None  # with `spmd`, the mesh on which the shards are DTensors

    @staticmethod
    def over(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> "DataParallel":
        if dims is None:
            return DataParallel(mesh, engine_mesh(mesh))
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError(
                "mesh must have mesh_dim_names when dp_mesh_dims is provided: "
                "init_device_mesh(device, shape, mesh_dim_names=('dp', 'tp'))"
            )
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in names:
                raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
        parts = [_part(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
        engine = engine_mesh(*parts, shards=bool(dims.shard_names))
        return DataParallel(parts[-1], engine, mesh, dims, _with_one_shard_dim(mesh, dims, parts))

    @property
    def device(self) -> torch.device:
        return device_of(self.mesh)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Its last dimension alone."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]

    def check(self, parameter: torch.Tensor, path: str) -> None:
        """An error if a parameter does not lie as this asks for."""
        if not isinstance(parameter, DTensor):
            if self.spmd is not None:
                raise ValueError(
                    f"With dp_mesh_dims parameters must be DTensors on the mesh, and '{path}' is none: give it to "
                    "distribute_tensor(parameter, mesh, placements), or its module to distribute_module(module, mesh)"
                )
            return
        other = parameter.device_mesh.device_type
        if other != self.mesh.device_type:
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{other} for DTensor and {self.mesh.device_type} for FSDP ('{path}')"
            )
        if self.spmd is None:
            return
        if parameter.device_mesh != self.spmd:
            raise ValueError(
                f"With dp_mesh_dims parameters must be on the same mesh: '{path}' is on {parameter.device_mesh}, and "
                f"{self.spmd} was given; distribute all parameters over the mesh that you give to fully_shard"
            )
        for name, placement in zip(self.spmd.mesh_dim_names, parameter.placements, strict=True):
            if name in (*self.dims.shard_names, *self.dims.replicate_names) and not placement.is_replicate():
                raise ValueError(
                    f"Expected Replicate on the data parallel dim '{name}', got {placement} for '{path}': fully_shard cuts "
                    "there itself"
                )

    def layout(self, parameter: torch.Tensor, dim: int) -> Layout:
        """Of a parameter which the engine cuts along ``dim``, over the last dimension of its mesh."""
        replicated = (Replicate(),) * (self.engine.ndim - 1)
        if not isinstance(parameter, DTensor):
            return Layout(self.mesh, (*replicated, Shard(dim)), None, self.engine.ndim - 1)
        given = tuple(parameter.placements)
        around = Around(parameter.device_mesh, given, self._dims_among(parameter.device_mesh))
        if self.spmd is not None:
            return Layout(self.result, self._placements_on_result(given, dim), around, self._cut_of_result())
        before = parameter.device_mesh
        mine = _cut(dim, _ranks_that_cut(dim, given, before.shape))
        return Layout(_joined(self.mesh, before), (*replicated, mine, *given), around, self.engine.ndim - 1)

    def _dims_among(self, mesh: DeviceMesh) -> frozenset[int]:
        """Those that a parameter's own mesh has."""
        if self.spmd is None:
            return frozenset()
        return frozenset(map(mesh.mesh_dim_names.index, (*self.dims.shard_names, *self.dims.replicate_names)))

    def _placements_on_result(self, given: Placements, dim: int) -> Placements:
        names = self.spmd.mesh_dim_names
        if not self.dims.shard_names:
            return given
        first = min(map(names.index, self.dims.shard_names))
        mine = _cut(dim, _ranks_that_cut(dim, given[first + 1 :], self.spmd.shape[first + 1 :]))
        placed = dict(zip(names, given, strict=True))
        placed[names[first]] = placed["_".join(self.dims.shard_names)] = mine
        return tuple(placed.get(name, Replicate()) for name in self.result.mesh_dim_names)

    def _cut_of_result(self) -> int | None:
        names = self.dims.shard_names
        return self.result.mesh_dim_names.index("_".join(names)) if names else None


def _with(numbers: Sequence[int], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def _part(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _with_one_shard_dim(mesh: DeviceMesh, dims: DataParallelMeshDims, parts: list[DeviceMesh]) -> DeviceMesh:
    """``mesh``, where several of its dimensions shard with one in their place: cuts of cuts are other cuts."""
    if len(dims.shard_names) < 2:
        return mesh
    first = min(dims.shard_names, key=mesh.mesh_dim_names.index)
    kept: list[DeviceMesh] = []
    for name in mesh.mesh_dim_names:
        if name == first:
            kept += parts
        elif name not in (*dims.shard_names, *dims.replicate_names):
            kept.append(mesh[name])
    return DeviceMesh._concatenate(kept)


def _ranks_that_cut(dim: int, placements: Placements, sizes: tuple[int, ...]) -> int:
    ranks = 1
    for size, placement in zip(sizes, placements, strict=True):
        ranks *= size if placement.is_shard(dim) else 1
    return ranks


def _cut(dim: int, split: int) -> Placement:
    """A cut of what mesh dimensions further right, of ``split`` ranks together, have cut along ``dim`` already."""
    return Shard(dim) if split == 1 else _StridedShard(dim, split_factor=split)


def _joined(data_parallel: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    if data_parallel.mesh_dim_names and other.mesh_dim_names:
        try:
            return DeviceMesh._concatenate([data_parallel, other])
        except RuntimeError as error:
            reason = str(error)
    else:
        reason = "one of them has no mesh_dim_names"
    raise ValueError(
        "Parameters that are DTensors have to be on a slice of the mesh that the FSDP mesh is a slice of, both with "
        f"mesh_dim_names; got {other} for the parameter and {data_parallel} for fully_shard: {reason}"
    )
