"""What a step costs: no Python frame of libfsdp, nothing left behind when a model goes."""

import ctypes
import gc
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import libfsdp
from harness import on_ranks
from libfsdp import fully_shard
from subjects import mine, mlp, rows, seeded


def sharded_mlp(**options):
    model = seeded(mlp)
    for block in (model[0], model[2], model):
        fully_shard(block, **options)
    return model


def frames_of_libfsdp(step):
    """The functions of the package that run while `step` does."""
    folder = os.path.dirname(libfsdp.__file__)
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            seen.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


@on_ranks(2)
def test_no_python_frame_of_ours_in_a_step():
    def step(model, optimizer):
        model(mine(rows(0, 5)).to(model[0].weight.dtype)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for policy, expected in [
        (libfsdp.MixedPrecisionPolicy(), False),
        (libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False), False),
        (libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16), True),
    ]:
        model = sharded_mlp(mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer) if expected else None
        seen = frames_of_libfsdp(lambda: step(model, optimizer))
        assert bool(seen) == expected, seen


def open_files():
    return len(os.listdir("/proc/self/fd"))


def threads():
    return len(os.listdir("/proc/self/task"))


def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is no leak
    with open("/proc/self/status") as file:  # without the pages of files, which come and go
        kinds = dict(line.split(":", 1) for line in file)
    return sum(int(kinds[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))


@on_ranks(2)
def test_a_hundred_models_leave_nothing_behind():
    def once():
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.rand(2, 256)).sum().backward()
        optimizer.step()

    for _ in range(10):
        once()
    gc.collect()
    before = open_files(), threads(), resident()
    for _ in range(100):
        once()
    gc.collect()
    deadline = time.monotonic() + 60
    while threads() > before[1] and time.monotonic() < deadline:  # one that has been told to end may wait for a core
        time.sleep(0.01)
    after = open_files(), threads(), resident()
    assert after[0] <= before[0] + 1, "file descriptors"
    assert after[1] <= before[1], "threads"
    assert after[2] <= before[2] + (4 << 20), "memory: 100 models of half a MiB"


@on_ranks(2, comm=("shm",))
def test_models_are_freed_by_reference_counting():
    import weakref

    gc.collect()
    gc.disable()
    model = sharded_mlp()
    model(mine(rows(0, 5))).sum().backward()
    gone = weakref.ref(model), weakref.ref(model[0])
    unit = weakref.ref(fully_shard.state(model))
    del model
    assert gone[0]() is None and gone[1]() is None and unit() is None
    gc.enable()


@on_ranks(1, comm=("shm",))
def test_gradients_are_freed_with_zero_grad():
    model = fully_shard(nn.Linear(1024, 1024))
    model(torch.rand(1, 1024)).sum().backward()
    import weakref

    gradient = weakref.ref(next(model.parameters()).grad.to_local().untyped_storage())
    model.zero_grad()
    gc.collect()
    assert gradient() is None


@on_ranks(2, comm=("shm",))
def test_saved_state_outlives_the_model():
    model = sharded_mlp()
    saved = {name: value.full_tensor() for name, value in model.state_dict().items()}
    state = model.state_dict()
    del model
    gc.collect()
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), saved[name])
    dist.barrier()


@on_ranks(2)
def test_a_step_can_be_recorded():
    model = sharded_mlp()
    with tempfile.TemporaryDirectory() as folder:
        with libfsdp.trace(pathlib.Path(folder) / "step.json"):
            model(mine(rows(0, 5))).pow(2).mean().backward()
        files = os.listdir(folder)
        assert files == [f"step.rank{dist.get_rank()}.json"]
        events = json.loads((pathlib.Path(folder) / files[0]).read_text())
    spans = [(event["name"], event["args"]["unit"]) for event in events if event["ph"] == "X"]
    for unit in ("0", "2", "(root)"):
        assert ("start reduction", unit) in spans, spans
    assert {event["pid"] for event in events} == {dist.get_rank()}
