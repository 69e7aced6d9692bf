"""What the host does around the computing, in Python: the units of bench/host.cpp, sharded by PyTorch or libfsdp."""

import sys
import time

import torch
import torch.distributed as dist
from linear_units import WIDTH, make_units
from serve import serve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

try:
    from fsdp_bench_no_op import make_backend, stop_answering
except ImportError:  # built without the Python package: PyTorch's own, which copies an all-gather's input for each rank
    BACKEND = "fake"

    def stop_answering():
        pass
else:
    BACKEND = "no_op"
    dist.Backend.register_backend(
        BACKEND, lambda _store, rank, size, _timeout: make_backend(rank, size), devices=["cpu"]
    )


def fully_shard_units(model: nn.Sequential, world: int, fully_shard) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_units(model: nn.Sequential, fsdp) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for i, unit in enumerate(model):
        model[i] = fsdp(unit, **options)
    return fsdp(model, **options)


def shard(model: nn.Sequential, world: int, contender: str) -> nn.Module:
    if contender in ("fsdp2", "fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    else:
        from libfsdp import FullyShardedDataParallel, fully_shard
    if contender in ("fsdp1", "python_fsdp1"):
        return wrap_units(model, FullyShardedDataParallel)
    return fully_shard_units(model, world, fully_shard)


def time_step(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).sum().backward()
    seconds = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.grad = None
    return seconds


def per_unit(request: dict) -> list[float]:
    """Seconds of forward and backward for each unit, without those that the layers themselves take."""
    units, linears, world = request["units"], request["linears"], request["world"]
    dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=world)
    sharded, plain = make_units(units, linears), make_units(units, linears)
    sharded = shard(sharded, world, sys.argv[1])
    stop_answering()
    x = torch.randn(4, WIDTH)
    extra = []
    for i in range(-3, request["repeats"]):
        seconds = time_step(sharded, x) - time_step(plain, x)
        if i >= 0:
            extra.append(seconds / units)
    dist.destroy_process_group()
    return extra


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"per_unit": per_unit})
