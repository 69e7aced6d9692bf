#!/usr/bin/env python3
"""gpu.py [--ranks N]: training on GPUs beside PyTorch's FSDP2 and FSDP1, in turns in one process a rank. Ranks that outnumber the
GPUs share the first one: then host time and memory say something, and seconds a step do not."""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from gpt import GPT, VOCABULARY, Block
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import libfsdp

BF16 = torch.bfloat16
SETTINGS = {
    "117 M, bf16": dict(width=1024, layers=8, sequence=512, batch=8, bf16=True),
    "117 M, fp32": dict(width=1024, layers=8, sequence=256, batch=4, bf16=False),
    "5 M, 30 units, bf16": dict(width=128, layers=30, sequence=64, batch=1, bf16=True),
}
TURNS, STEPS_A_TURN = 5, 5


def fully_sharded(shard, model, bf16, **options):
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32) if bf16 else torch_fsdp.MixedPrecisionPolicy()
    for block in model.blocks:
        shard(block, mp_policy=policy, **options)
    return shard(model, mp_policy=policy, **options)


def wrapped(wrap, original, model, bf16):
    precision = torch_fsdp.MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32) if bf16 else None
    return wrap(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        use_orig_params=original,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )


def plain(model, bf16):
    return model.to(BF16) if bf16 else model


CONTENDERS = {
    "plain": plain,
    "ours, fully_shard": functools.partial(fully_sharded, libfsdp.fully_shard),
    "PyTorch's FSDP2": functools.partial(fully_sharded, torch_fsdp.fully_shard),
    "ours, FSDP1": functools.partial(wrapped, libfsdp.FullyShardedDataParallel, False),
    "PyTorch's FSDP1": functools.partial(wrapped, torch_fsdp.FullyShardedDataParallel, False),
    "ours, FSDP1, original": functools.partial(wrapped, libfsdp.FullyShardedDataParallel, True),
    "PyTorch's FSDP1, original": functools.partial(wrapped, torch_fsdp.FullyShardedDataParallel, True),
}


class Contender:
    def __init__(self, make, width, layers, sequence, batch, bf16):
        torch.manual_seed(0)
        gc.collect()
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        with torch.device("cuda"):
            model = GPT(width, layers, sequence)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.tokens = torch.randint(VOCABULARY, (batch, sequence + 1), generator=generator).cuda()
        self.model = make(model, bf16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.host, self.optimizers, self.steps, self.losses, self.peak = [], [], [], [], 0
        self.mine = None

    def step(self) -> torch.Tensor:
        """Milliseconds of the host go to `host`, and, for the optimizer, to `optimizers`."""
        begin = time.perf_counter()
        loss = self.model(self.tokens)
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.host.append(1e3 * (middle - begin))
        self.optimizers.append(1e3 * (time.perf_counter() - middle))
        return loss

    def turn(self) -> None:
        others = torch.cuda.memory_allocated() - self.mine if self.mine is not None else self.before
        torch.cuda.reset_peak_memory_stats()
        losses, waited = [], 0.0
        for step in range(STEPS_A_TURN):  # each begins with an idle GPU: its queue of kernels is limited
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            losses.append(self.step())
            torch.cuda.synchronize()
            waited += time.perf_counter() - begin
        self.steps.append(1e3 * waited / STEPS_A_TURN)
        self.losses += [loss.item() for loss in losses]
        self.peak = torch.cuda.max_memory_allocated() - others
        del losses
        self.mine = torch.cuda.memory_allocated() - others


def measure(name, setting) -> list[dict]:
    contenders = {}
    for who, make in CONTENDERS.items():
        contenders[who] = Contender(make, **setting)
        contenders[who].turn()  # warms up
    for _ in range(TURNS):
        for contender in contenders.values():
            contender.turn()
    units = setting["layers"] + 1
    base = statistics.median(contenders["plain"].host[STEPS_A_TURN:])
    found = []
    for who, contender in contenders.items():
        host, optimizer = (statistics.median(values[STEPS_A_TURN:]) for values in (contender.host, contender.optimizers))
        found.append(
            dict(
                setting=name,
                who=who,
                ranks=dist.get_world_size(),
                ms_per_step=round(statistics.median(contender.steps[1:]), 2),
                host_ms=round(host, 2),
                host_us_per_unit=round(1e3 * (host - base) / units),
                optimizer_host_ms=round(optimizer, 2),
                peak_mb=round(contender.peak / 1e6, 1),
                last_loss=round(contender.losses[-1], 6),
            )
        )
    return found


def work() -> None:
    warnings.simplefilter("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["FSDP_CHECK_ORDER"] = "0"  # of the first few hundred collectives, which is most of what is measured here
    if torch.cuda.device_count() < ranks:
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=ranks)
    for name, setting in SETTINGS.items():
        if os.environ["GPU_SETTINGS"] not in name:
            continue
        for row in measure(name, setting):
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="settings with this in their name")
    given = parser.parse_args()
    ranks = given.ranks
    with tempfile.TemporaryDirectory() as folder:
        where = dict(WORLD_SIZE=str(ranks), MEETING=f"{folder}/meeting", GPU_WORKER="1", GPU_SETTINGS=given.only)
        workers = [
            subprocess.Popen([sys.executable, __file__], env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        while all(worker.poll() is None for worker in workers):
            time.sleep(0.1)
        failed = any(worker.poll() for worker in workers)
        for worker in workers:
            if failed:  # the others would wait for it
                worker.kill()
            failed |= worker.wait() != 0
    sys.exit(failed)


if __name__ == "__main__":
    work() if os.environ.get("GPU_WORKER") else main()
