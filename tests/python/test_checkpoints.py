"""Checkpoints on disk: the same files as C++ has, from and into models that either API has sharded, or none."""

import copy
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import libfsdp
from checkpoint_runs import FORMS, Odd, Run, check_same
from harness import TIMEOUT, on_ranks, run_program
from libfsdp import FullyShardedDataParallel, fully_shard
from subjects import TORCH_IS_OLD, loss_of, rows, seeded, whole


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


@on_ranks(2, comm=("shm",))
def test_buffers_that_were_expanded_are_loaded(folder=None):
    def made(value):
        model = nn.Linear(3, 3)
        model.register_buffer("scale", torch.full((1,), value).expand(4))
        return fully_shard(model)

    first, second = made(2.0), made(5.0)
    first_optimizer, second_optimizer = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    libfsdp.save(folder, first, first_optimizer, step=1)
    libfsdp.load(folder, second, second_optimizer)
    assert torch.equal(second.scale, torch.full((4,), 2.0))


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


class PartlyUsed(Odd):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))


@on_ranks(1, 2, comm=("shm",))
def test_parameters_without_a_state_become_part_of_a_flat_one(folder=None):
    run, other = (Run(form, seed, PartlyUsed) for seed, form in enumerate(("fully_shard", "flat")))
    run.step(0)
    assert run.model.unused not in run.optimizer.state
    run.save(folder)
    libfsdp.load(folder, other.model, other.optimizer)
    wanted, got = run.values(), other.values()
    assert got["unused step"] == 1 and not got["unused exp_avg"].any() and not got["unused exp_avg_sq"].any()
    check_same({name: value for name, value in got.items() if name in wanted}, wanted)


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


@on_ranks(4, comm=("shm",))
def test_one_replica_writes_all_of_it(folder=None):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["shard"].get_group()
    model, others = (fully_shard(seeded(Odd, seed), mesh=mesh) for seed in (1, 2))
    optimizer, its_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, others))
    loss_of(model, torch.ones(3, 5)).backward()
    optimizer.step()
    wanted = {name: whole(value.detach()).clone() for name, value in model.named_parameters()}
    moments = [whole(optimizer.state[value]["exp_avg"]) for value in model.parameters()]
    if mesh.get_local_rank("replicate") == 0:
        libfsdp.export_safetensors(f"{folder}/exported", model, process_group=group)
        libfsdp.save(f"{folder}/saved", model, optimizer, process_group=group)
    dist.barrier()
    plain = seeded(Odd, 3)
    libfsdp.import_safetensors(f"{folder}/exported", plain)
    libfsdp.load(f"{folder}/saved", others, its_optimizer)
    loaded = dict(others.named_parameters())
    for name, value in plain.named_parameters():
        assert torch.equal(value, wanted[name]), name
        assert torch.equal(whole(loaded[name].detach()), wanted[name]), name
    for value, moment in zip(others.parameters(), moments, strict=True):
        assert torch.equal(whole(its_optimizer.state[value]["exp_avg"]), moment)


class InFloat(torch.optim.Optimizer):
    """Its states are float32, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["m"] = torch.zeros_like(parameter, dtype=torch.float32).add_(1 / 3)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            self.state[parameter]["m"] = state["state"][number]["m"].clone()


@on_ranks(2, comm=("shm",))
def test_optimizers_may_keep_the_dtype_of_their_states(folder=None):
    for form in ("fully_shard", "flat"):
        run, other = (Run(form, seed, lambda: Odd().bfloat16()) for seed in (1, 2))
        run.optimizer, other.optimizer = (InFloat(each.model.parameters()) for each in (run, other))
        run.optimizer.step()
        run.save(f"{folder}/{form}")
        libfsdp.load(f"{folder}/{form}", other.model, other.optimizer)
        for parameter in other.optimizer.param_groups[0]["params"]:
            m = other.optimizer.state[parameter]["m"]
            values = {*whole(m).flatten().tolist()} - {0.0}  # as which what a flat one has at its end is loaded
            assert m.dtype == torch.float32 and values == {torch.tensor(1 / 3).item()}, form


def cut_in_two_ways(model, mesh):
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def cut_on_one_mesh(model, mesh):
    def distribute(_name, module, mesh):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, (Replicate(), Shard(0)))))

    distribute_module(model, mesh, distribute)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=libfsdp.DataParallelMeshDims(shard="data"))


@on_ranks(6, comm=("shm",))
def test_uneven_parts_that_are_cut_again(folder=None):
    """Of 19 rows tensor parallel ranks have 10 and 9, and of these data parallel ones 4, 4, 2 and 3, 3, 3. Of 7 some have none."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    for cut in (cut_in_two_ways,) if TORCH_IS_OLD else (cut_in_two_ways, cut_on_one_mesh):
        for outputs in (19, 7):
            make = lambda outputs=outputs: nn.Sequential(nn.Linear(4, outputs))  # noqa: E731
            at, wanted = f"{folder}/{cut.__name__}{outputs}", seeded(make).state_dict()
            libfsdp.save(f"{at}/whole", seeded(make))
            model, other = cut(seeded(make, 2), mesh), seeded(make, 3)
            libfsdp.load(f"{at}/whole", model)
            with libfsdp.summon_full_params(model):
                check_same({name: whole(value.detach()) for name, value in model.named_parameters()}, wanted, at)
            libfsdp.save(f"{at}/cut", model)
            libfsdp.load(f"{at}/cut", other)
            check_same(other.state_dict(), wanted, at)


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


@on_ranks(2, comm=("shm",))
def test_older_checkpoints_make_room(folder=None):
    run = Run("fully_shard")
    for step in range(4):
        run.save(folder, step=step, keep_last=2)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    dist.barrier()


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


ENDS_WITHOUT_WAITING = """
import sys
import torch.distributed as dist
import libfsdp
from torch import nn

dist.init_process_group("gloo")
model = libfsdp.fully_shard(nn.Linear(2048, 4096))
sys.kept = libfsdp.save_async(sys.argv[1], model)
"""


def test_a_process_that_multiprocessing_forked_ends_when_its_checkpoint_is_there(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDS_WITHOUT_WAITING)
    run_program(program, 2, tmp_path / "run")
    assert libfsdp.latest(tmp_path / "run") == str(tmp_path / "run" / "step-00000000")


def test_a_run_that_python_begins_goes_on_in_cpp_and_back(tmp_path):
    paths = [str(tmp_path / name) for name in ("begun", "cpp", "ended", "alone")]
    run_on_ranks(goes_on, 2, begin=0, end=2, path=paths[0])
    command = [os.path.join(os.environ["FSDP_TESTS"], "save_test"), "--gtest_filter=GoesOnFromPython.*"]
    result = subprocess.run(
        [*command, "--gtest_also_run_disabled_tests"],
        env={**os.environ, "FSDP_TEST_FROM": paths[0], "FSDP_TEST_TO": paths[1]},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
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
