"""Several Python threads: nobody waits for another rank or thread with the interpreter's lock in hand."""

import concurrent.futures
import contextlib
import datetime
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import libfsdp
from harness import on_ranks
from libfsdp import fully_shard
from subjects import loss_of, mine, mlp, rows, seeded


def run_together(*bodies):
    """Each in a thread of its own; fails if one of them hangs, or raises."""
    failures = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs:\n" + "\n".join(map(stack_of, threads))
    if failures:
        raise failures[0]


def stack_of(thread):
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"


@contextlib.contextmanager
def another_thread_runs(name):
    """Once it has run for a while, the other ranks hear of it."""

    def run():
        for _ in range(15):
            time.sleep(0.01)
        dist.distributed_c10d._get_default_store().set(name, "")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join()


def wait_until_another_thread_has_run(name):
    dist.distributed_c10d._get_default_store().wait([name], datetime.timedelta(seconds=60))


@on_ranks(2, comm=("shm",))
def test_a_write_that_waits_lets_other_threads_run():
    model = fully_shard(nn.Linear(4, 4, bias=False))
    parameter = next(model.parameters())
    writes = {
        "dtensor": lambda: parameter.add_(1.0),
        "foreach": lambda: torch._foreach_mul_([parameter], 2.0),
        "local": lambda: parameter.to_local().add_(1.0),
        "announced": model.note_shard_writes,
    }
    with torch.no_grad():
        for name, write in writes.items():
            model(torch.ones(1, 4))
            dist.barrier()
            if dist.get_rank() == 1:
                wait_until_another_thread_has_run(name)
                write()
                continue
            with another_thread_runs(name):
                write()


@on_ranks(2, comm=("shm",))
def test_a_read_that_waits_lets_other_threads_run():
    """Rank 0 reads what rank 1 has yet to write."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    parameter = next(model.parameters())
    with torch.no_grad():
        model(torch.ones(1, 4))
        parameter.add_(1.0)
        if dist.get_rank() == 1:
            wait_until_another_thread_has_run("read")
            model(torch.ones(1, 4))
            return
        with another_thread_runs("read"):
            model(torch.ones(1, 4))


@on_ranks(1)
def test_units_come_and_go_below_a_root_that_trains():
    """One thread has the engine's lock and wants Python's, the other has Python's and wants the engine's."""
    model = seeded(mlp)
    for block in (model[0], model[2], model):
        fully_shard(block)
    trained = threading.Event()

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        try:
            for step in range(100):
                loss_of(model, mine(rows(step, 5))).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            trained.set()

    def come_and_go():
        group = DeviceMesh.from_group(dist.new_group([0]), "cpu")  # groups are for one thread at a time
        others = [fully_shard(nn.Linear(3, 3), mesh=group) for _ in range(100)]

        def run():
            while others and not trained.is_set():
                libfsdp.share_comm_ctx([model, others[-1]])
                str(libfsdp.describe(others[-1]))
                del others[-1]  # with the last reference the unit goes
                time.sleep(0.001)

        return run

    run_together(train, come_and_go(), come_and_go())


@on_ranks(1, 2, comm=("shm",))
def test_two_threads_take_turns_on_one_root():
    model, reference = seeded(mlp), seeded(mlp)
    for block in (model[0], model[2], model):
        fully_shard(block)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def turn(own):
        def steps():
            for step in range(20):
                turns[own].acquire()
                loss_of(model, mine(rows(2 * step + own, 5))).backward()
                turns[1 - own].release()

        return steps

    run_together(turn(0), turn(1))
    for step in range(40):
        for part in rows(step, 5).split(4):
            (loss_of(reference, part) / dist.get_world_size()).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@on_ranks(1)
def test_a_hook_that_waits_for_a_thread_that_steps():
    """Users' functions are called without the engine's lock: what they wait for may need it."""
    model = seeded(mlp)
    for block in (model[0], model[2], model):
        fully_shard(block)
    model.set_reshard_after_backward(False)
    pool = concurrent.futures.ThreadPoolExecutor(1)

    @torch.no_grad()
    def step(parameter):
        parameter.sub_(parameter.grad)

    def step_elsewhere(parameter):
        pool.submit(step, parameter).result(60)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_elsewhere)
    loss_of(model, mine(rows(0, 5))).backward()
