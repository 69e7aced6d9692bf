"""Checkpoints of a GPT that PyTorch's FSDP2 has sharded, by its distributed checkpoint (DCP), with the state of AdamW. Started
by bench/run.py."""

import json
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from serve import serve
from step import Training
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Worker:
    def __init__(self, task: dict):
        self.task = task
        shape = task["tokens_shape"]
        tokens = torch.from_file(task["tokens"], size=math.prod(shape), dtype=torch.int64).view(shape)
        self.batch = tokens[0, task["rank"]].clone()

    def start(self, request: dict) -> bool:
        self.training = Training(self.task)
        self.background = dist.new_group()  # the thread that writes makes collectives, on a group of its own
        return True

    def step(self, request: dict) -> float:
        return self.training.step(self.batch)

    def save(self, request: dict) -> float:
        return timed(lambda: dcp.save(self._state(), checkpoint_id=request["folder"]))

    def save_async(self, request: dict) -> float:
        """How long training stands still."""

        def save() -> None:
            self.pending = dcp.async_save(
                self._state(), checkpoint_id=request["folder"], process_group=self.background
            )

        return timed(save)

    def wait(self, request: dict) -> bool:
        self.pending.result()
        return True

    def load(self, request: dict) -> float:
        def load() -> None:
            state = self._state()
            dcp.load(state, checkpoint_id=request["folder"])
            loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.training.model, self.training.optimizer, **loaded)

        return timed(load)

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}


def timed(body: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


if __name__ == "__main__":
    worker = Worker(json.loads(sys.argv[1]))
    names = ["start", "step", "save", "save_async", "wait", "load"]
    serve({name: getattr(worker, name) for name in names})
