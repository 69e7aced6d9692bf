"""Checkpoints on disk: the same files as C++ has, from and into models that either API has sharded, or none."""

import copy
import importlib.util
import os
import pathlib
import resource
import subprocess

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import libfsdp
from fsdp1_subjects import quietly
from harness import on_ranks
from libfsdp import FullyShardedDataParallel, fully_shard
from subjects import loss_of, mine, rows, seeded, whole


class Odd(nn.Module):
    """Of odd sizes, with a tied weight, a buffer, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.block = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
        self.block[2].bias = self.first.bias
        self.last = nn.Linear(7, 3)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last(self.block(self.norm(self.first(x))))


def sharded_by(shard):
    def form(model):
        shard(model.block)
        shard(model)
        return model

    return form


def wrapped(use_orig_params):
    def form(model):
        model.block = quietly(FullyShardedDataParallel, model.block, use_orig_params=use_orig_params)
        return quietly(FullyShardedDataParallel, model, use_orig_params=use_orig_params)

    return form


FORMS = {
    "plain": lambda model: model,
    "fully_shard": sharded_by(fully_shard),
    "wrapped": wrapped(True),
    "flat": wrapped(False),
}


class Run:
    def __init__(self, form, seed=1, make=Odd, **options):
        self.form, self.model = form, FORMS[form](seeded(make, seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 1e-2, **options})

    def step(self, number):
        batch = rows(number, 5)
        loss = loss_of(self.model, batch if self.form == "plain" else mine(batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder, **options):
        path = libfsdp.save(folder, self.model, self.optimizer, **options)
        dist.barrier()
        return path

    def values(self):
        """Whole, by name: not through what is tested."""
        if isinstance(self.model, FullyShardedDataParallel):
            kind = FullyShardedDataParallel.state_dict_type(
                self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
            )
            with kind:
                state = quietly(self.model.state_dict)
                optimizer = quietly(FullyShardedDataParallel.optim_state_dict, self.model, self.optimizer)["state"]
        else:
            state = {name: whole(value) for name, value in self.model.state_dict().items()}
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            optimizer = {
                names[parameter]: {key: whole(value) for key, value in each.items()}
                for parameter, each in self.optimizer.state.items()
            }
        states = {f"{name} {key}": value for name, each in optimizer.items() for key, value in each.items()}
        return {**state, **states}


def check_same(got, wanted, what=""):
    assert got.keys() == wanted.keys(), what
    for name, value in wanted.items():
        same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        assert same, f"{what} {name}: {got[name]} instead of {value}"


@on_ranks(1, 3)
def test_a_checkpoint_goes_from_each_form_into_each(folder=None):
    for writer in FORMS:
        run = Run(writer)
        run.step(0)
        run.step(1)
        wanted = run.values()
        path = run.save(f"{folder}/{writer}", step=2)
        assert path.endswith("step-00000002") and libfsdp.latest(f"{folder}/{writer}") == path
        for reader in FORMS:
            other = Run(reader, seed=2, lr=1.0, weight_decay=0.0)
            other.step(7)
            loaded = libfsdp.load(f"{folder}/{writer}", other.model, other.optimizer)
            assert (loaded.path, loaded.step, loaded.missing_keys) == (path, 2, [])
            check_same(other.values(), wanted, f"{writer} into {reader}:")
            assert (other.optimizer.defaults["lr"], other.optimizer.param_groups[0]["lr"]) == (1.0, 1e-2)
            assert other.optimizer.param_groups[0]["weight_decay"] == run.optimizer.param_groups[0]["weight_decay"]


@on_ranks(2)
def test_a_run_goes_on_with_the_same_losses(folder=None):
    for form in FORMS:
        run, other = Run(form), Run(form, seed=2)
        run.step(0)
        run.save(f"{folder}/{form}")
        libfsdp.load(f"{folder}/{form}", other.model, other.optimizer)
        for step in (1, 2, 3):
            assert torch.equal(run.step(step), other.step(step)), form
        check_same(other.values(), run.values(), form)


OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "Adam": dict(lr=torch.tensor(0.01), foreach=False, amsgrad=True),
    "AdamW": dict(lr=0.01, fused=True),
    "NAdam": dict(foreach=True),
    "RAdam": {},
    "Adamax": {},
    "ASGD": {},
    "RMSprop": dict(centered=True, momentum=0.9),
    "Adadelta": dict(maximize=True),
    "Adagrad": {},
}


def in_groups(kind, model, options):
    """Of parameters, of which the first is frozen."""
    first, *others = model.parameters()
    if isinstance(model, FullyShardedDataParallel):
        others = [first, *others]
    else:
        first.requires_grad_(False)
    lower = options.get("lr", 0.02) * 0.5
    return getattr(torch.optim, kind)([{"params": others[:2], "lr": lower}, {"params": others[2:]}], **options)


@on_ranks(2)
def test_a_checkpoint_is_written_while_training_goes_on(folder=None):
    for form in FORMS:
        for most in (None, 300):
            run = Run(form)
            run.step(0)
            wanted, seen = copy.deepcopy(run.values()), [1, 2]
            kept = {"step": 1, "max_staged_bytes": most, "extra": {"seen": seen}}
            pending = libfsdp.save_async(f"{folder}/{form}{most}", run.model, run.optimizer, **kept)
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.fill_(7)
            seen.append(3)
            run.step(1)
            path = pending.wait()
            assert path.endswith("step-00000001") and pending.done() and pending.wait() == path
            reader = Run("plain", seed=2)
            assert libfsdp.load(path, reader.model, reader.optimizer).extra == {"seen": [1, 2]}
            check_same(reader.values(), wanted, f"{form}, {most}")


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


@on_ranks(2, comm=("shm",))
def test_the_state_of_every_optimizer_goes_on(folder=None):
    for form in ("fully_shard", "flat"):
        for kind, options in OPTIMIZERS.items():
            run, other = Run(form), Run(form, seed=2)
            run.optimizer, other.optimizer = (in_groups(kind, each.model, options) for each in (run, other))
            run.step(0)
            other.step(3)
            run.save(f"{folder}/{form}{kind}")
            libfsdp.load(f"{folder}/{form}{kind}", other.model, other.optimizer)
            got, wanted = other.optimizer.state_dict(), run.optimizer.state_dict()
            for its, group in zip(got["param_groups"], wanted["param_groups"], strict=True):
                assert its == group and [*map(type, its.values())] == [*map(type, group.values())], kind
            assert got["state"].keys() == wanted["state"].keys(), kind
            check_same(other.values(), run.values(), f"{form} {kind}")
            for number, state in wanted["state"].items():
                for key, value in state.items():
                    its, what = got["state"][number][key], f"{form} {kind} {number} {key}"
                    assert type(its) is type(value), what
                    assert getattr(its, "dtype", None) == getattr(value, "dtype", None), what
            for step in (1, 2):
                assert torch.equal(run.step(step), other.step(step)), f"{form} {kind}"


@on_ranks(2, comm=("shm",))
def test_states_keep_the_dtype_that_the_optimizer_gives_them(folder=None):
    """Of parameters in bfloat16: states of torch.optim are in it too."""
    run, other = (Run("fully_shard", seed, lambda: Odd().bfloat16()) for seed in (1, 2))
    in_float = Run("fully_shard", 3)
    loss_of(run.model, rows(0, 5).bfloat16()).backward()
    run.optimizer.step()
    run.save(folder)
    for each in (other, in_float):
        libfsdp.load(folder, each.model, each.optimizer)
    for number, state in run.optimizer.state_dict()["state"].items():
        for each, dtype in ((other, torch.bfloat16), (in_float, torch.float32)):
            loaded = each.optimizer.state_dict()["state"][number]
            assert (loaded["exp_avg"].dtype, loaded["step"].dtype) == (dtype, torch.float32)
            assert torch.equal(whole(loaded["exp_avg"]), whole(state["exp_avg"]).to(dtype))


def two_linears():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


@on_ranks(4, comm=("shm",))
def test_dtensors_of_any_mesh(folder=None):
    """Cut by tensor parallelism too, on replicas, or by PyTorch's own function."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def in_two_ways(shard):
        model = parallelize_module(seeded(two_linears), both["tensor"], plan)
        return shard(model, mesh=both["data"])

    models = {
        "tensor parallel": lambda: in_two_ways(fully_shard),
        "tensor parallel alone": lambda: parallelize_module(seeded(two_linears), both["tensor"], plan),
        "replicas": lambda: fully_shard(seeded(two_linears), mesh=replicated),
        "PyTorch's": lambda: torch_fully_shard(seeded(two_linears), mesh=replicated),
        "PyTorch's, tensor parallel": lambda: in_two_ways(torch_fully_shard),
        "plain": lambda: seeded(two_linears),
    }

    def run(make):
        model = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    for number, (writer, make) in enumerate(models.items()):
        others = [*models, *models][number + 1 :]
        model, optimizer = run(make)
        loss = loss_of(model, torch.ones(3, 6))
        loss.backward()
        optimizer.step()
        wanted = {name: whole(value.detach()) for name, value in model.named_parameters()}
        moments = {name: whole(optimizer.state[value]["exp_avg"]) for name, value in model.named_parameters()}
        libfsdp.save(f"{folder}/{writer}", model, optimizer)
        dist.barrier()
        for reader in dict.fromkeys((writer, "plain", *others[:2])):
            other, its_optimizer = run(models[reader])
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(0)
            libfsdp.load(f"{folder}/{writer}", other, its_optimizer)
            for name, parameter in other.named_parameters():
                assert torch.equal(whole(parameter.detach()), wanted[name]), f"{writer} into {reader}: {name}"
                state = its_optimizer.state[parameter]
                assert torch.equal(whole(state["exp_avg"]), moments[name]) and state["step"] == 1, name
            loss_of(other, torch.ones(3, 6)).backward()
            its_optimizer.step()
    model = models["tensor parallel alone"]()
    of_group = f"{folder}/of {both['data'].get_local_rank()}"
    path = libfsdp.save(of_group, model, process_group=both["tensor"].get_group())
    wanted = [whole(value.detach()).clone() for value in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    assert libfsdp.load(of_group, model, process_group=both["tensor"].get_group()).path == path
    assert all(torch.equal(whole(value.detach()), values) for value, values in zip(model.parameters(), wanted))


@on_ranks(2, comm=("shm",))
def test_extra_values_and_random_numbers(folder=None):
    run = Run("fully_shard")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    milestones = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4])
    run.step(0)
    scheduler.step()
    extra = {
        "epoch": 3,
        "note": "some text é",
        "weights": torch.arange(5),
        "nested": {"list": [1, 2.5, None, (True, "x")], 7: {}, "infinite": [float("inf"), float("-inf")]},
        "scheduler": scheduler.state_dict(),
        "milestones": milestones.state_dict(),
    }
    torch.manual_seed(5 + dist.get_rank())
    run.save(folder, step=1, extra=extra)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    loaded = libfsdp.load(folder, run.model, run.optimizer)
    assert torch.equal(torch.rand(3), drawn), "each rank's own"
    assert torch.equal(loaded.extra.pop("weights"), extra.pop("weights"))
    assert loaded.extra == extra and type(loaded.extra["nested"]["list"][3]) is tuple
    scheduler.load_state_dict(loaded.extra["scheduler"])
    milestones.load_state_dict(loaded.extra["milestones"])
    torch.manual_seed(0)
    after = torch.rand(3)
    torch.manual_seed(0)
    libfsdp.load(folder, run.model, run.optimizer, random_numbers=False)
    assert torch.equal(torch.rand(3), after)
    checkpoint = libfsdp.SavedCheckpoint(folder)
    assert (checkpoint.path, checkpoint.step, checkpoint.extra["epoch"]) == (loaded.path, 1, 3)
    assert checkpoint.tensors["model/first.weight"].shape == (7, 5)
    assert torch.equal(checkpoint.read("model/first.weight"), run.values()["first.weight"])
    assert checkpoint.optimizer["state"]["first.weight"] == {"step": 1}
    assert checkpoint.optimizer["param_groups"][0]["betas"] == (0.9, 0.999)


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
def test_older_checkpoints_make_room(folder=None):
    run = Run("fully_shard")
    for step in range(4):
        run.save(folder, step=step, keep_last=2)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    dist.barrier()


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
    assert os.listdir(folder) == []
    with pytest.raises(libfsdp.Error, match="'big' is, or has in it, a number that 64 bits do not hold"):
        libfsdp.save(folder, model, extra={"big": [1 << 64]})
    export(str.upper)
    dist.barrier()
    assert os.listdir(folder) == ["model.safetensors"]


def same_loss(model, step):
    x = (torch.arange(20.0) + step).sin().view(4, 5)
    return model(x).pow(2).mean()


@on_ranks(2)
def goes_on(begin, end, path, to=""):
    """Writes the losses beside the checkpoints."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (1 + number) / 4)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    if begin > 0:
        loaded = libfsdp.load(path, model, optimizer)
        assert loaded.step == begin
        losses = loaded.extra["losses"]
    for step in range(begin, end):
        loss = same_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    libfsdp.save(to or path, model, optimizer, step=end, extra={"losses": losses})


def run_on_ranks(function, ranks, means="shm", **arguments):
    from harness import run

    run(function, ranks, means, arguments)


def test_a_run_that_python_begins_goes_on_in_cpp_and_back(tmp_path):
    paths = [str(tmp_path / name) for name in ("begun", "cpp", "ended", "alone")]
    run_on_ranks(goes_on, 2, begin=0, end=2, path=paths[0])
    command = [os.path.join(os.environ["FSDP_TESTS"], "save_test"), "--gtest_filter=GoesOnFromPython.*"]
    result = subprocess.run(
        [*command, "--gtest_also_run_disabled_tests"],
        env={**os.environ, "FSDP_TEST_FROM": paths[0], "FSDP_TEST_TO": paths[1]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run_on_ranks(goes_on, 2, begin=4, end=6, path=paths[1], to=paths[2])
    run_on_ranks(goes_on, 2, begin=0, end=6, path=paths[3])
    got, wanted = (libfsdp.SavedCheckpoint(path) for path in paths[2:])
    assert len(got.extra["losses"]) == 6
    torch.testing.assert_close(torch.tensor(got.extra["losses"]), torch.tensor(wanted.extra["losses"]), rtol=1e-5, atol=0)
    for name in wanted.tensors:
        if name.startswith(("model/", "optimizer/")):
            torch.testing.assert_close(got.read(name), wanted.read(name), rtol=1e-4, atol=1e-6, msg=name)
    assert got.optimizer["state"] == wanted.optimizer["state"]


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
@on_ranks(2, comm=("shm",))
def test_weights_for_other_programs(folder=None):
    for form in FORMS:
        run, other = Run(form), Run(form, seed=2)
        wanted = {name: value for name, value in run.values().items() if " " not in name}
        libfsdp.export_safetensors(f"{folder}/{form}", run.model, max_shard_bytes=300, name_in_files="model.{}".format)
        keys = libfsdp.import_safetensors(f"{folder}/{form}", other.model, name_in_files="model.{}".format)
        assert keys.missing_keys == [] and keys.unexpected_keys == []
        check_same({name: value for name, value in other.values().items() if " " not in name}, wanted, form)
        with pytest.raises(libfsdp.Error, match="is of another model"):
            libfsdp.import_safetensors(f"{folder}/{form}", other.model)
        check_same(in_safetensors(f"{folder}/{form}"), once({f"model.{name}": value for name, value in wanted.items()}), form)
        dist.barrier()
        libfsdp.export_safetensors(f"{folder}/{form}", run.model)
        dist.barrier()
        assert os.listdir(f"{folder}/{form}") == ["model.safetensors"]
        check_same(in_safetensors(f"{folder}/{form}"), once(wanted), form)


def in_safetensors(folder):
    """As the package that defines these files reads them."""
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


def once(values):
    """Without the second name of what is tied."""
    return {name: value for name, value in values.items() if not name.endswith("block.2.bias")}


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
@on_ranks(2, comm=("shm",))
def test_matrices_may_lie_transposed_in_files(folder=None):
    import safetensors.torch as safetensors

    models = [fully_shard(seeded(lambda: nn.Linear(4, 6), seed)) for seed in (1, 2)]
    libfsdp.export_safetensors(folder, models[0], transposed="weight".__eq__)
    libfsdp.import_safetensors(folder, models[1], transposed="weight".__eq__)
    got = safetensors.load_file(f"{folder}/model.safetensors")
    wanted = [{name: value.full_tensor() for name, value in model.state_dict().items()} for model in models]
    for name, value in wanted[0].items():
        assert torch.equal(got[name].t() if name == "weight" else got[name], value)
        assert torch.equal(wanted[1][name], value)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="the package transformers is not installed")
@on_ranks(2, comm=("shm",))
def test_weights_of_transformers(folder=None):
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=31, n_positions=16)

    def made(seed):
        return seeded(lambda: transformers.GPT2LMHeadModel(config).eval(), seed)

    def logits(model):
        with torch.no_grad():
            return model(torch.arange(12).view(1, 12)).logits

    first = made(1)
    wanted = logits(first)
    if dist.get_rank() == 0:
        first.save_pretrained(f"{folder}/theirs")
        config.save_pretrained(f"{folder}/ours")
    dist.barrier()
    for form in ("fully_shard", "flat"):
        model = made(2)
        if form == "flat":
            sharded = quietly(FullyShardedDataParallel, model)
        else:
            for block in model.transformer.h:
                fully_shard(block)
            sharded = fully_shard(model)
        libfsdp.import_safetensors(f"{folder}/theirs", sharded)
        torch.testing.assert_close(logits(sharded), wanted, rtol=1e-5, atol=1e-6)
        libfsdp.export_safetensors(f"{folder}/ours", sharded, max_shard_bytes=2000)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/ours").eval()
        assert torch.equal(logits(loaded), wanted)
        dist.barrier()
