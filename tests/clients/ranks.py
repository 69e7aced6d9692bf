"""Runs the cases of one client on two ranks, which are forked once everything is imported. Started by run.py.

    ranks.py CLIENT {torch,libfsdp} FOLDER CASE...

In FOLDER: `skipped`, with the reason, or for each case and rank what came out, what it said, and how it failed.
"""

import importlib
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
LIMIT = float(os.environ.get("CLIENTS_LIMIT", 120))  # seconds for a case


class Counted:
    """The ``fully_shard`` that clients find, which is PyTorch's or libfsdp's."""

    def __init__(self, fully_shard: Callable):
        self.fully_shard, self.calls = fully_shard, 0
        self.state = fully_shard.state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fully_shard(*args, **kwargs)


def put_in_place(library: str) -> Counted:
    """What a program does by its import, done to programs that are installed: before they import it."""
    import torch.distributed._composable.fsdp as older_place
    import torch.distributed.fsdp as place
    import torch.distributed.fsdp._fully_shard as inner_place

    source = importlib.import_module("libfsdp") if library == "libfsdp" else place
    counted = Counted(source.fully_shard)
    for module in (place, older_place, inner_place):
        module.fully_shard = counted
    return counted


def be_rank(rank: int, case: Callable, files: pathlib.Path, counted: Counted) -> None:
    with open(f"{files}.said{rank}", "w") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    addressed = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # some look for it; the group is made without
    ranked = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS)
    os.environ.update(addressed, **{name: str(value) for name, value in ranked.items()})
    os.makedirs(f"{files}.files", exist_ok=True)
    os.chdir(f"{files}.files")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{files}.store", RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    start = time.monotonic()
    outcome = case()
    seconds = time.monotonic() - start
    assert counted.calls, "the client has not called fully_shard"
    dist.barrier()
    torch.save(dict(vars(outcome), seconds=seconds), f"{files}.outcome{rank}")


def fork_rank(*arguments: Any) -> int:
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        be_rank(*arguments)
        status = 0
    except BaseException:
        rank, _, files, _ = arguments
        pathlib.Path(f"{files}.failed{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def await_ranks(children: dict[int, int], files: pathlib.Path) -> None:
    """Kills them when the time is over, or five seconds after one has failed."""
    deadline = time.monotonic() + LIMIT
    running = dict(children)
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, child in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            del running[rank]
            if status:
                deadline = min(deadline, time.monotonic() + 5)
                note_end(files, rank, f"ended by signal {status & 127}")
    for rank, child in running.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if len(running) == len(children):
            note_end(files, rank, f"no end within {LIMIT:g} s")


def note_end(files: pathlib.Path, rank: int, how: str) -> None:
    failed = pathlib.Path(f"{files}.failed{rank}")
    if not failed.exists():
        failed.write_text(how)


def main() -> None:
    client, library, folder, *cases = sys.argv[1:]
    folder = pathlib.Path(folder)
    counted = put_in_place(library)
    try:
        importlib.import_module(client)
    except ImportError as error:
        (folder / "skipped").write_text(str(error))
        return
    from training import CASES

    for name in cases:
        files = folder / name
        await_ranks({rank: fork_rank(rank, CASES[name], files, counted) for rank in range(RANKS)}, files)


if __name__ == "__main__":
    main()
