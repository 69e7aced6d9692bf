"""Runs a test's body on several ranks, each a process of its own, joined by a group that the test names."""

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
import traceback

import on_gpus
import pytest

TIMEOUT = int(os.environ.get("FSDP_TEST_TIMEOUT", "300"))  # of a body, on a machine that does much else
FOLDER = str(pathlib.Path(__file__).parent)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["harness_preload"])


def on_ranks(*sizes, comm=("shm", "gloo"), alone=False, lost=()):
    """Decorates a test: its body runs on so many ranks, over each of these means of communication.

    The ranks are processes that the file's tests share, one test after another, unless it wants to be `alone` in them. It
    kills those `lost`.
    """

    def decorate(body):
        @pytest.mark.parametrize("means", comm)
        @pytest.mark.parametrize("ranks", sizes)
        @functools.wraps(body)
        def test(ranks, means, **arguments):
            if on_gpus.WANTED and means == "shm":
                pytest.skip("shared memory is for the CPU")
            if alone or lost:
                run(body, ranks, means, arguments, lost)
            else:
                run_shared(body, ranks, means, arguments)

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


def key_of(body, ranks, means):
    return body.__module__, ranks, means


class Ranks:
    """Processes that run the bodies of tests, one after another."""

    def __init__(self, body, ranks, means, lost=()):
        self.key = key_of(body, ranks, means)
        self.says = f"of {ranks} over {means}"
        self.lost = lost
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = _context.Pipe()
            job = (body.__module__, rank, ranks, means, self.folder.name, bool(lost))
            process = _context.Process(target=_work, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, body, arguments):
        for pipe in self.pipes:
            try:
                pipe.send((body.__name__, arguments))
            except OSError:  # it ended before it was told: what it said of that is collected
                pass
        if failures := self._collect():
            text = "\n".join(f"rank {rank} {self.says}:\n{said}" for rank, said in failures)
            pytest.fail(text, pytrace=False)

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def _collect(self):
        """Ranks that failed with what they said: those that raised before those that vanished or hung."""
        deadline = time.monotonic() + TIMEOUT
        raised, vanished = [], []
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes)):
            if rank in self.lost:
                continue
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic()) if not raised else 5.0):
                    vanished.append((rank, f"no answer within {TIMEOUT} s"))
                elif (text := pipe.recv()) is not None:
                    raised.append((rank, text))
            except (EOFError, OSError):
                process.join(5)
                vanished.append((rank, f"the process ended with exit code {process.exitcode}"))
        for rank in self.lost:
            self.processes[rank].join(10)
            if (code := self.processes[rank].exitcode) != -signal.SIGKILL:
                vanished.append((rank, f"was to be killed, but has the exit code {code}"))
        return raised + vanished


def run(body, ranks, means, arguments, lost=()):
    """In processes that are new."""
    with contextlib.closing(Ranks(body, ranks, means, lost)) as new:
        new.run(body, arguments)


_last = None  # the ranks of the test before, while they may be asked again


def run_shared(body, ranks, means, arguments):
    """In the processes of the test before, if they are such."""
    global _last
    if not _last or _last.key != key_of(body, ranks, means):
        end_last()
        _last = Ranks(body, ranks, means)
    try:
        _last.run(body, arguments)
    except BaseException:
        end_last()
        raise


@atexit.register
def end_last():
    global _last
    if _last:
        _last.close()
    _last = None


def run_program(path, ranks, *arguments):
    """What it prints when it is started as torchrun starts it, in processes that have imported PyTorch already."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        printed = [pathlib.Path(folder, str(rank)) for rank in range(ranks)]
        argv = [str(path), *map(str, arguments)]
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
        jobs = [(argv, rank, ranks, where, str(printed[rank])) for rank in range(ranks)]
        processes = [_context.Process(target=_run_program, args=job, daemon=True) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
            process.kill()
        texts = [each.read_text() for each in printed]
        assert all(process.exitcode == 0 for process in processes), "\n".join(texts)[-3000:]
    return "".join(texts)


def _run_program(argv, rank, ranks, where, printed):
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _work(pipe, module, rank, ranks, means, folder, some_are_lost):
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
        for count in itertools.count():
            name, arguments = pipe.recv()
            body = getattr(importlib.import_module(module), name).body
            torch.manual_seed(0)
            if "folder" in inspect.signature(body).parameters:
                arguments["folder"] = f"{folder}/files{count}"
            body(**arguments)
            if not some_are_lost:
                dist.barrier()
            pipe.send(None)
            gc.collect()  # what the test made goes before the next one
    except EOFError:  # no other test
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
        pipe.close()
        os._exit(1)
