"""What goes wrong in the middle of PyTorch's operators reaches Python as the library's own exceptions."""

import datetime
import functools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import harness
import libfsdp
from libfsdp import fully_shard

on_ranks = functools.partial(harness.on_ranks, alone=True)  # they leave groups behind that do not work


@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
@on_ranks(2, lost=(1,))
def test_a_rank_that_dies_is_a_comm_error_on_the_others(moment):
    units = [fully_shard(nn.Linear(4, 4)) for _ in range(3)]
    model = fully_shard(nn.Sequential(*units))

    def die(step, now):
        if dist.get_rank() == 1 and (step, now) == (2, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(libfsdp.CommError, match=r"^\[.*rank 0"):
        for step in range(4):
            x = units[0](torch.ones(1, 4))
            die(step, "forward")
            x.register_hook(lambda gradient: die(step, "backward"))
            model[1:](x).sum().backward()
            die(step, "optimizer")
            libfsdp.clip_grad_norm_(model, 1.0)


@on_ranks(2)
def test_different_units_on_different_ranks_are_a_comm_error():
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))))
    start = time.monotonic()
    with pytest.raises(libfsdp.CommError, match="rank 0.*'0'.*rank 1.*'1'|rank 1.*'1'.*rank 0.*'0'"):
        model[torch.distributed.get_rank()](torch.ones(1, 4)).sum().backward()
    assert time.monotonic() - start < 30


@on_ranks(2, comm=("shm",))
def test_names_in_errors_may_be_cut_within_a_character():
    names = ["\u00e9" * 60, "\u00e4" * 60]  # longer than what is told to others, of two bytes each
    model = nn.Module()
    for name in names:
        model.add_module(name, fully_shard(nn.Linear(4, 4)))
    fully_shard(model)
    with pytest.raises(libfsdp.CommError, match=f"{names[0][:40]}'.*{names[1][:40]}'|{names[1][:40]}'.*{names[0][:40]}'"):
        getattr(model, names[dist.get_rank()])(torch.ones(1, 4)).sum().backward()


@on_ranks(1)
def test_a_mistake_in_an_operator_is_the_librarys_error():
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(libfsdp.Error, match="was written between the beginning"):
        out = model(torch.ones(1, 2))  # noqa: F841  its graph
        with torch.no_grad():
            model.weight.zero_()


@on_ranks(1)
def test_a_mistake_in_backward_is_the_librarys_error():
    model = fully_shard(nn.Linear(2, 2))
    weight = model.weight
    loss = model(torch.ones(1, 2)).sum()
    weight.data = torch.zeros(2, 2)
    with pytest.raises(libfsdp.Error, match="the data of 'weight' were replaced"):
        loss.backward()


@on_ranks(2, comm=("shm",))
def test_ctrl_c_ends_a_long_wait_and_the_others_are_told():
    model = fully_shard(nn.Linear(4, 4))
    met = dist.new_group()
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
        waits = queue.SimpleQueue()

        def interrupt():
            waits.get()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        loss.register_hook(waits.put)  # no Python follows that would be interrupted before the wait
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        dist.barrier(met)
    else:
        dist.barrier(met)
        with pytest.raises(libfsdp.CommError, match="rank 0 was interrupted while it waited for rank 1"):
            loss.backward()


@on_ranks(2, comm=("shm",))
def test_shared_memory_waits_as_long_as_the_process_group_would():
    patient = dist.new_group()
    dist.barrier()  # the group's making has the same limit
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    if dist.get_rank() == 0:
        with pytest.raises(libfsdp.CommError, match="gave no sign for 10"):
            model(torch.ones(1, 4)).sum().backward()
    dist.barrier(patient)


@on_ranks(2, comm=("gloo",))
def test_a_forked_child_has_no_part_in_collectives():
    model = fully_shard(nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs is a failure
            try:
                model(torch.ones(1, 4))
            except libfsdp.Error as error:
                os._exit(0 if "a forked child" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


FORKS = """
import os, signal, sys, torch, torch.distributed as dist, libfsdp
libfsdp.use_shared_memory(sys.argv[3] == "shm")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
model = libfsdp.fully_shard(torch.nn.Linear(4, 4))
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
dist.destroy_process_group()
"""


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_a_forked_child_of_a_program_ends_with_all_that_runs_at_exit(comm, tmp_path):
    run_on_two_ranks(FORKS, tmp_path / "store", comm)


def run_on_two_ranks(program, *arguments, environment=None):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {}),
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=harness.TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


ENDS_AFTER_A_COLLECTIVE = """
import os, sys, torch, torch.distributed as dist, libfsdp
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
model = libfsdp.fully_shard(torch.nn.Linear(4, 4))
loss = model(torch.ones(1, 4)).sum()
loss.backward()
mean = loss.detach()
os.environ["GLOO_IS_LATE"] = "1"
dist.all_reduce(mean)
dist.destroy_process_group()
"""


GROUPS_END_AFTER_COLLECTIVES = """
import os, sys, torch, torch.distributed as dist, libfsdp
libfsdp.use_shared_memory(False)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
for _ in range(5):
    group = dist.new_group()
    model = libfsdp.FullyShardedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    model(torch.ones(1, 4)).sum().backward()
    del model
    dist.destroy_process_group(group)
    del group
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("program", [ENDS_AFTER_A_COLLECTIVE, GROUPS_END_AFTER_COLLECTIVES], ids=["program", "group"])
def test_a_program_or_a_group_may_end_right_after_a_collective(program, tmp_path):
    late = pathlib.Path(os.environ.get("FSDP_TESTS", "")) / "late_gloo_thread.so"
    if not late.exists():
        pytest.skip("the library that delays Gloo's threads is not built (FSDP_TESTS)")
    run_on_two_ranks(program, tmp_path / "store", environment={"LD_PRELOAD": str(late)})
