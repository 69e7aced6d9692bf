"""Checkpoints that cannot be written or loaded: errors that say what to do, the same on all ranks, and nothing changes."""

import os
import pathlib
import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import libfsdp
from checkpoint_runs import Odd, Run, check_same
from fsdp1_subjects import TORCH, quietly
from harness import on_ranks
from libfsdp import fully_shard
from subjects import loss_of, seeded, whole


@on_ranks(3, comm=("shm",))
def test_a_background_save_that_fails_is_an_error_for_all_who_wait(folder=None):
    run = Run("fully_shard")
    before = run.save(folder, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))  # random numbers take more
    pending = libfsdp.save_async(folder, run.model, run.optimizer, step=2)
    with pytest.raises(libfsdp.Error, match=r"\[save\] rank 1: .*rank-00001.safetensors: File too large"):
        pending.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert libfsdp.latest(folder) == before
    del pending
    dist.barrier()
    assert libfsdp.save_async(folder, run.model, run.optimizer, step=3).wait().endswith("step-00000003")


class Averaging(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("mean/fast", torch.zeros_like(parameter))


@on_ranks(2, comm=("shm",))
def test_states_whose_names_could_not_be_read_again_are_not_saved(folder=None):
    model = fully_shard(nn.Linear(2, 2))
    optimizer = Averaging(model.parameters())
    optimizer.step()
    with pytest.raises(libfsdp.Error, match="'mean/fast' of 'weight' has a '/' in its name"):
        libfsdp.save(folder, model, optimizer)
    assert libfsdp.latest(folder) is None


@on_ranks(1, comm=("shm",))
def test_mistakes_are_named(folder=None):
    model, itself = nn.Linear(2, 2), []
    itself.append(itself)
    libfsdp.export_safetensors(f"{folder}/exported", model)
    first = libfsdp.save(f"{folder}/saved", model)
    assert libfsdp.save(f"{folder}/saved", model) == first + ".1"
    pathlib.Path(folder, "file").touch()
    mistakes = [
        (lambda: libfsdp.save(folder, model, extra={"x": itself}), "'x' contains itself, or has more than 32 levels"),
        (lambda: libfsdp.save(folder, model, extra={"x": np.float32(1)}), r"numpy.float32.*give .* \.item\(\)"),
        (lambda: libfsdp.save(folder, model, extra={"x": "\ud800"}), "'x' is, or has in it, a text that is no Unicode"),
        (lambda: libfsdp.save(folder, model, extra={"x": torch.eye(3).to_sparse()}), "'extra/x' is sparse"),
        (lambda: libfsdp.save(folder, model, extra={"x": next(libfsdp.fully_shard(nn.Linear(2, 2)).parameters())}), r"'x' is, .*DTensor.*full_tensor\(\)"),
        (lambda: libfsdp.save(folder, nn.Linear(2, 2, device="meta")), "'model/weight' is on the meta device"),
        (lambda: libfsdp.save(folder, model, keep_last=-1), "keep_last of 0 or more, got -1"),
        (lambda: libfsdp.save(f"{folder}/file", model), "there is a file where a folder is wanted"),
        (lambda: libfsdp.save("x" * 300, model), "give a shorter one"),
        (lambda: libfsdp.load(f"{folder}/file", model), "file is no folder"),
        (lambda: libfsdp.load(first, model), "has no checkpoint, and is none .one that is saved again is named step-N.1"),
        (lambda: libfsdp.load(f"{folder}/exported", model), "is what export_safetensors has written"),
        (lambda: libfsdp.import_safetensors(f"{folder}/saved", model), "is what save has written, or has it"),
        (lambda: libfsdp.export_safetensors(folder, model, max_shard_bytes=0), "max_shard_bytes of 1 or more, got 0"),
    ]
    for mistake, text in mistakes:
        with pytest.raises(libfsdp.Error, match=text):
            mistake()
    for arguments, text in [
        ({"step": 1.5}, "step has to be a whole number, and is 1.5"),
        ({"extra": [1]}, "extra has to be a dictionary"),
        ({"optimizer": {}}, "optimizer has to be an optimizer"),
        ({"model": {}}, "model has to be a module"),
    ]:
        with pytest.raises(TypeError, match=text):
            libfsdp.save(folder, **{"model": model, **arguments})
    assert sorted(os.listdir(folder)) == ["exported", "file", "saved"]


@on_ranks(2, comm=("shm",))
def test_ranks_that_are_told_different_things(folder=None):
    rank, model = dist.get_rank(), fully_shard(seeded(Odd, 1))
    for different in ({"step": rank}, {"keep_last": rank}):
        with pytest.raises(libfsdp.Error, match="expected the same on all ranks, got step 0 and keep_last 0 on the first"):
            libfsdp.save(folder, model, **different)
    libfsdp.export_safetensors(f"{folder}/0", model)
    wanted = whole(model.first.weight)
    other = fully_shard(seeded(Odd, 2))
    libfsdp.export_safetensors(f"{folder}/1", other)
    libfsdp.import_safetensors(f"{folder}/{rank}", other)
    assert torch.equal(whole(other.first.weight), wanted), "all of it from the first rank's"


@on_ranks(2, comm=("shm",))
def test_ranks_that_would_export_different_files(folder=None):
    is_first = dist.get_rank() == 0

    def refuses(words, model, **options):
        with pytest.raises(libfsdp.Error, match=words):
            libfsdp.export_safetensors(f"{folder}/exported", model, **options)
        assert not os.path.exists(folder)

    model = fully_shard(seeded(Odd, 1))
    renamed = None if is_first else "other.{}".format
    refuses("first one has 'count' .* and rank 1 has 'other.count'", model, name_in_files=renamed)
    turned = lambda name: is_first and name == "first.weight"  # noqa: E731
    refuses("'first.weight' .*, transposed.*rank 1 has 'first.weight'", model, transposed=turned)
    refuses("first one has '.*-of-.*rank 1 has '.*in model.safetensors", model, max_shard_bytes=100 if is_first else 10_000)
    if is_first:
        model.register_buffer("seen", torch.zeros(8))
    refuses(r"first one has 'seen' \(Float, \[8\]\) in model.safetensors and rank 1 has nothing else", model)


@on_ranks(4, comm=("shm",))
def test_a_group_that_lacks_elements_exports_nothing(folder=None):
    model = fully_shard(seeded(Odd, 1))
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "rank"))
    mine = f"{folder}/{half.get_local_rank('half')}"
    with pytest.raises(libfsdp.Error, match="these ranks have not all elements of '"):
        libfsdp.export_safetensors(mine, model, process_group=half.get_group("rank"))
    assert not os.path.exists(mine)


@on_ranks(2, comm=("shm",))
def test_errors_are_errors_on_all_ranks_and_change_nothing(folder=None):
    run = Run("fully_shard")
    run.step(0)
    run.save(folder)
    is_first = dist.get_rank() == 0
    before = run.values()

    def refuses(words, function, *args, **kwargs):
        with pytest.raises(libfsdp.Error, match=words):
            function(*args, **kwargs)
        check_same(run.values(), before, words)
        dist.barrier()

    save = lambda **options: libfsdp.save(f"{folder}/other", run.model, run.optimizer, **options)  # noqa: E731
    refuses("'data' is, or has in it, <class 'set'>", save, extra={"data": {1} if is_first else 1})
    refuses("rank 0: .*'data'.*Tensor", save, extra={"data": [torch.ones(2)]})
    refuses("key that is neither", save, extra={"data": {1.5: 2}})
    refuses("step of 0 or more", save, step=-1)
    refuses("has no checkpoint", libfsdp.load, f"{folder}/other", run.model)
    refuses("is of another model. It lacks: ", libfsdp.load, folder, fully_shard(nn.Linear(5, 7)))
    stranger = torch.optim.AdamW(fully_shard(nn.Linear(5, 7)).parameters())
    refuses(r"sizes \[7, 5\] that is not the model's", libfsdp.save, f"{folder}/other", run.model, stranger)
    plain = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(plain.parameters())
    lbfgs.step(lambda: (lbfgs.zero_grad(), loss_of(plain, torch.ones(1, 2)).backward(), plain.bias.sum())[2])
    refuses("torch.distributed.checkpoint", libfsdp.save, f"{folder}/other", plain, lbfgs)
    for other in (
        torch.optim.SGD(run.model.parameters(), momentum=0.9),
        torch.optim.AdamW([{"params": [p]} for p in run.model.parameters()]),
        torch.optim.AdamW(list(run.model.parameters())[1:]),
    ):
        refuses("the state is another optimizer's", libfsdp.load, folder, run.model, other)
        assert not other.state
    with libfsdp.summon_full_params(run.model):
        with pytest.raises(libfsdp.Error, match="summon_full_params"):
            save()
    assert not os.path.exists(f"{folder}/other") or os.listdir(f"{folder}/other") == []
    if is_first:
        (path,) = pathlib.Path(folder, "step-00000000").glob("rank-00001*")
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    dist.barrier()
    refuses("rank 1: .*rank-00001.safetensors: '.*' is damaged", libfsdp.load, folder, run.model, run.optimizer)
    keys = libfsdp.load(folder, nn.Sequential(), strict=False, random_numbers=False)  # what is damaged is not read
    assert "first.weight" in keys.unexpected_keys and not keys.missing_keys


@on_ranks(2, comm=("shm",))
def test_what_callbacks_raise_on_one_rank_is_an_error_on_all(folder=None):
    model = fully_shard(nn.Linear(5, 7))
    rank = dist.get_rank()

    def export(name):
        libfsdp.export_safetensors(folder, model, name_in_files=name)

    def raising(error):
        def name(name):
            if rank == 1:
                raise error
            return name

        return name

    with pytest.raises(libfsdp.Error, match="rank 1: KeyError: 'no such name'") as raised:
        export(raising(KeyError("no such name")))
    assert isinstance(raised.value.__cause__, KeyError if rank == 1 else type(None))
    with pytest.raises(KeyboardInterrupt if rank == 1 else libfsdp.Error, match="" if rank == 1 else "KeyboardInterrupt"):
        export(raising(KeyboardInterrupt()))
    with pytest.raises(libfsdp.Error, match="a text from name_in_files for 'weight', got 3"):
        export(lambda name: 3)
    assert not os.path.exists(folder)
    with pytest.raises(libfsdp.Error, match="'big' is, or has in it, a number that 64 bits do not hold"):
        libfsdp.save(folder, model, extra={"big": [1 << 64]})
    export(str.upper)
    dist.barrier()
    assert os.listdir(folder) == ["model.safetensors"]


def check_refused(words, folder, model):
    """By all that writes or reads its values."""
    attempts = (
        (libfsdp.save, f"{folder}/saved"),
        (libfsdp.load, f"{folder}/plain"),
        (libfsdp.export_safetensors, f"{folder}/exported"),
        (libfsdp.import_safetensors, f"{folder}/plain weights"),
    )
    for attempt, path in attempts:
        with pytest.raises(libfsdp.Error, match=words):
            attempt(path, model)
    for path in ("saved", "exported"):
        assert not os.path.exists(f"{folder}/{path}") or os.listdir(f"{folder}/{path}") == []


@on_ranks(2, comm=("shm",))
def test_what_pytorchs_own_wrapper_has_cut_is_an_error(folder=None):
    plain = nn.Sequential(nn.Linear(8, 8))
    libfsdp.save(f"{folder}/plain", plain)
    libfsdp.export_safetensors(f"{folder}/plain weights", plain)
    for use_orig_params in (False, True):
        wrapper = quietly(TORCH, nn.Linear(8, 8), use_orig_params=use_orig_params)
        words = "was cut by PyTorch's FullyShardedDataParallel.* libfsdp.FullyShardedDataParallel, or use torch.distributed.checkpoint"
        for model in (nn.Sequential(wrapper), nn.Sequential(wrapper.module)):
            check_refused(words, folder, model)


@on_ranks(6, comm=("shm",))
def test_pieces_that_are_not_where_their_placements_have_them_are_an_error(folder=None):
    """As PyTorch's own function leaves them where it cuts uneven parts again."""
    plain = nn.Sequential(nn.Linear(4, 19))
    libfsdp.save(f"{folder}/plain", plain)
    libfsdp.export_safetensors(f"{folder}/plain weights", plain)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 19)), mesh["tensor"], {"0": ColwiseParallel()})
    check_refused("sizes that all these ranks divide", folder, torch_fully_shard(model, mesh=mesh["data"]))
