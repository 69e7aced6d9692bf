"""Runs a test's body on several ranks, each a process of its own, joined by a group that the test names."""

import functools
import importlib
import inspect
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import traceback

import on_gpus
import pytest

TIMEOUT = int(os.environ.get("FSDP_TEST_TIMEOUT", "300"))  # of a body, on a machine that does much else
FOLDER = str(pathlib.Path(__file__).parent)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["harness_preload"])


def on_ranks(*sizes, comm=("shm", "gloo"), lost=()):
    """Decorates a test: its body runs on so many ranks, over each of these means of communication. It kills those `lost`."""

    def decorate(body):
        @pytest.mark.parametrize("means", comm)
        @pytest.mark.parametrize("ranks", sizes)
        @functools.wraps(body)
        def test(ranks, means, **arguments):
            if on_gpus.WANTED and means == "shm":
                pytest.skip("shared memory is for the CPU")
            run(body, ranks, means, arguments, lost)

        test.__signature__ = _with_parameters(body)
        test.body = body
        return test

    return decorate


def _with_parameters(body):
    given = inspect.signature(body).parameters.values()
    own = [p for p in given if p.default is inspect.Parameter.empty]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("ranks", "means")]
    return inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + more)


IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where flushing does not wait for a disk


def run(body, ranks, means, arguments, lost=()):
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = _context.Pipe(duplex=False)
            job = (body.__module__, body.__name__, rank, ranks, means, folder, arguments, bool(lost))
            process = _context.Process(target=_work, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            failures = _collect(pipes, processes, lost)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failures:
            text = "\n".join(f"rank {rank} of {ranks} over {means}:\n{said}" for rank, said in failures)
            pytest.fail(text, pytrace=False)


def _collect(pipes, processes, killed):
    """Ranks that failed with what they said: those that raised before those that vanished or hung."""
    import time

    deadline = time.monotonic() + TIMEOUT
    raised, lost = [], []
    for rank, (pipe, process) in enumerate(zip(pipes, processes)):
        if rank in killed:
            continue
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic()) if not raised else 5.0):
                lost.append((rank, f"no answer within {TIMEOUT} s"))
            elif (text := pipe.recv()) is not None:
                raised.append((rank, text))
        except EOFError:
            process.join(5)
            lost.append((rank, f"the process ended with exit code {process.exitcode}"))
    for rank in killed:
        processes[rank].join(10)
        if (code := processes[rank].exitcode) != -signal.SIGKILL:
            lost.append((rank, f"was to be killed, but has the exit code {code}"))
    return raised + lost


def _work(pipe, module, name, rank, ranks, means, folder, arguments, some_are_lost):
    try:
        sys.path.insert(0, FOLDER)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        import torch
        import torch.distributed as dist

        import libfsdp

        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", ranks)
        if on_gpus.WANTED:
            on_gpus.begin(store, rank, ranks)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        libfsdp.use_shared_memory(means == "shm")
        torch.manual_seed(0)
        body = getattr(importlib.import_module(module), name).body
        if "folder" in inspect.signature(body).parameters:
            arguments["folder"] = f"{folder}/files"
        body(**arguments)
        if some_are_lost:
            pipe.send(None)
            return
        dist.barrier()
        pipe.send(None)
        dist.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())
        pipe.close()
        os._exit(1)
