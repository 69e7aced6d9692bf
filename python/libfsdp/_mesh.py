"""DeviceMesh as the engine sees it."""

import atexit
import contextlib
import functools
import os
import pathlib
import re
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _C

_shared_memory = True


def use_shared_memory(enabled: bool) -> None:
    """Whether ranks on one host's CPU go over shared memory (the default) or over the mesh's own process groups.

    Holds for models sharded from now on; call it alike on all ranks. The environment variable ``FSDP_SHM=0`` does the
    same without a change of the program.
    """
    global _shared_memory
    _shared_memory = bool(enabled)


def default_mesh() -> DeviceMesh:
    """All ranks in one dimension, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build may be without a GPU
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: slice it, as in mesh['shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
        )


def engine_mesh(*meshes: DeviceMesh, shards: bool = True) -> _C.Mesh:
    """The dimensions of the meshes, one after another; the last one shards, unless ``shards`` is false."""
    device = device_of(meshes[0])
    dims = [(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]
    groups = [_group_of(mesh, dim, device) for mesh, dim in dims]
    names = [name for mesh in meshes for name in mesh.mesh_dim_names or ()]
    if not shards:
        groups.append(group_of_one())
        names.append("shard")
    return _C.Mesh(groups, names, device)


def _group_of(mesh: DeviceMesh, dim: int, device: torch.device) -> _C.Group:
    return group_of_one() if mesh.size(dim) == 1 else group_of(mesh.get_group(dim), device)


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], _C.Group]]" = weakref.WeakKeyDictionary()


def group_of(process_group: dist.ProcessGroup, device: torch.device) -> _C.Group:
    """The same one each time, since meshes are equal if their groups are the same; as long as the process group is there, since
    ranks may let go of their models at different times, and make new ones."""
    if process_group.size() == 1:
        return group_of_one()
    _let_gloo_finish_at_exit()
    known = _groups.setdefault(process_group, {})
    key = (device.type, _shared_memory, os.environ.get("FSDP_SHM"))
    if key not in known:
        known[key] = _C.group_of(process_group, device, _shared_memory)
    return known[key]


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """Gloo's threads free the tensors of the last collectives, and need Python's lock for that.

    One that asks for the lock when Python has begun to end aborts the process, and ``destroy_process_group()`` does not
    end these threads where PyTorch still holds a mesh of ``DTensor``s.
    """
    atexit.register(_let_gloo_finish)


def _let_gloo_finish() -> None:
    """Longer while a thread of Gloo's has work and waits for a core. One that waits for Python's lock gets it meanwhile."""
    time.sleep(0.1)
    deadline = time.monotonic() + 60
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        idle = 0 if _gloo_is_at_work() else idle + 1
        time.sleep(0.01)


def _gloo_is_at_work() -> bool:
    for thread in pathlib.Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if re.search(rb"\(pt_gloo_runloop\) [RD]", thread.read_bytes()):  # or waits for a page of memory
                return True
    return False


@functools.cache
def group_of_one() -> _C.Group:
    """It exchanges nothing. The same one each time: meshes are equal if their groups are the same."""
    return _C.group_of_one()


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
