"""Gloo's collectives, for the sizes of bench/collectives.cpp."""

import time

import torch
import torch.distributed as dist
from serve import serve


def seconds(measured) -> float:
    dist.barrier()
    start = time.perf_counter()
    measured()
    return time.perf_counter() - start


def best(times: int, measured) -> float:
    return min(seconds(measured) for _ in range(times))


def measure(request: dict) -> dict:
    numel, times, ranks = request["mebibytes"] << 18, request["times"], dist.get_world_size()
    whole, chunk = torch.ones(numel), torch.zeros(numel // ranks)
    return {
        "all_gather": best(times, lambda: dist.all_gather_into_tensor(whole, chunk)),
        "reduce_scatter": best(times, lambda: dist.reduce_scatter_tensor(chunk, whole)),
        "barrier": best(20 * times, dist.barrier),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    serve({"measure": measure})
