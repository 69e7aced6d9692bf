"""Training steps of a GPT in PyTorch: sharded by FSDP2, FSDP1, DDP or the libfsdp package. Started by bench/run.py."""

import json
import math
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT, Block, load_weights
from linear_units import make_units
from serve import serve
from torch import nn


def shard_fsdp2(model: GPT, task: dict) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard_blocks(model, task, fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy, mesh=mesh)


def shard_python(model: GPT, task: dict) -> nn.Module:
    from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    return fully_shard_blocks(model, task, fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)


def fully_shard_blocks(model, task, fully_shard, precision, offload, no_offload, **options) -> nn.Module:
    if task["param_dtype"]:
        options["mp_policy"] = precision(param_dtype=getattr(torch, task["param_dtype"]), reduce_dtype=torch.float32)
    options["offload_policy"] = offload(pin_memory=False) if task["offload"] else no_offload()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def shard_fsdp1(model: GPT, task: dict) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return wrap_blocks(model, FullyShardedDataParallel)


def shard_python_fsdp1(model: GPT, task: dict) -> nn.Module:
    from libfsdp import FullyShardedDataParallel

    return wrap_blocks(model, FullyShardedDataParallel)


def wrap_blocks(model: GPT, fsdp) -> nn.Module:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return fsdp(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def shard_ddp(model: GPT, task: dict) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


SHARDED_BY = {
    "fsdp2": shard_fsdp2,
    "fsdp1": shard_fsdp1,
    "ddp": shard_ddp,
    "python": shard_python,
    "python_fsdp1": shard_python_fsdp1,
}


class Training:
    def __init__(self, task: dict):
        dist.init_process_group("gloo")
        model = GPT(task["width"], task["layers"], task["sequence"])
        load_weights(model, task["weights"])
        self.model = SHARDED_BY[task["contender"]](model, task)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def without_sync(self):
        """Around the micro-batches whose gradients only accumulate."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(False)
            return nullcontext()
        return self.model.no_sync()

    def with_sync(self):
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(True)
        return nullcontext()

    def step(self, micro_batches: torch.Tensor) -> float:
        for i, batch in enumerate(micro_batches):
            with self.with_sync() if i + 1 == len(micro_batches) else self.without_sync():
                loss = self.model(batch)
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Worker:
    def __init__(self, task: dict):
        self.task = task
        self.training = None
        self.done = 0
        shape = task["tokens_shape"]
        self.tokens = torch.from_file(task["tokens"], size=math.prod(shape), dtype=torch.int64).view(shape)

    def start(self, request: dict) -> bool:
        self.training = Training(self.task)
        return True

    def shard(self, request: dict) -> float:
        """Seconds that sharding 50 units of 10 layers takes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = make_units(units=50, linears=10)
        dist.barrier()
        start = time.perf_counter()
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return time.perf_counter() - start

    def steps(self, request: dict) -> dict:
        losses = []
        start = time.perf_counter()
        for _ in range(request["count"]):
            losses.append(self.training.step(self.tokens[self.done % len(self.tokens), self.task["rank"]]))
            self.done += 1
        return {"seconds": (time.perf_counter() - start) / request["count"], "losses": losses}


if __name__ == "__main__":
    worker = Worker(json.loads(sys.argv[1]))
    serve({"start": worker.start, "steps": worker.steps, "shard": worker.shard})
