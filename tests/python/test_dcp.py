"""torch.distributed.checkpoint on models that libfsdp has sharded, beside PyTorch's ``fully_shard``; and tools/dcp.py."""

import contextlib
import importlib.util
import io
import itertools
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import libfsdp
from fsdp1_subjects import FSDP, quietly, wrapped
from harness import on_ranks, run
from libfsdp import FullyShardedDataParallel, fully_shard
from selection import selected
from subjects import loss_of, mine, rows, seeded, whole

Options = helpers.StateDictOptions
TOOL = str(pathlib.Path(__file__).parents[2] / "tools" / "dcp.py")


def some_model():
    """With a frozen parameter, one that two ranks do not share evenly, and a buffer."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)))
    model[0].bias.requires_grad_(False)
    model[2].register_buffer("count", torch.arange(3))
    return model


class Trained:
    def __init__(self, shard, seed=1, steps=1):
        self.model = seeded(some_model, seed)
        shard(self.model[2])
        shard(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2], "lr": 2e-2}, {"params": trained[2:]}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for step in range(steps):
            self.step(step)

    def step(self, number):
        loss = loss_of(self.model, mine(rows(number, 5)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def combinations(are_valid=lambda options: True, **values):
    """Those in which any three values meet; and one that is not valid."""
    all = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    some = selected([tuple(options.values()) for options in all if are_valid(options)], together=3)
    return [dict(zip(values, each)) for each in some] + [options for options in all if not are_valid(options)][:1]


def outcome(function, *args, **kwargs):
    """What a function returns, or the type of what it raises."""
    try:
        return quietly(function, *args, **kwargs)
    except Exception as error:
        return type(error)


def check_alike(ours, theirs, what):
    assert type(ours) is type(theirs), what
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), what
        for key, value in ours.items():
            check_alike(value, theirs[key], f"{what} {key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), what
        for i, (a, b) in enumerate(zip(ours, theirs)):
            check_alike(a, b, f"{what} {i}")
    elif isinstance(ours, DTensor):
        assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh), what
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), msg=lambda m: f"{what}: {m}")
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{what}: {m}")
    else:
        assert ours == theirs, what


GETS = combinations(
    full_state_dict=(False, True),
    cpu_offload=(False, True),
    ignore_frozen_params=(False, True),
    keep_submodule_prefixes=(False, True),
    flatten_optimizer_state_dict=(False, True),
)
SETS = combinations(
    are_valid=lambda options: options["full_state_dict"] or not options["broadcast_from_rank0"],
    full_state_dict=(False, True),
    broadcast_from_rank0=(False, True),
    cpu_offload=(False, True),
    strict=(False, True),
    flatten_optimizer_state_dict=(False, True),
)


@on_ranks(2, comm=("shm",))
def test_state_dict_helpers_give_what_they_give_of_pytorchs():
    ours, theirs = Trained(fully_shard), Trained(torch_fully_shard)
    for options in GETS:
        for below in (False, True) if options["keep_submodule_prefixes"] else (True,):
            given = [
                (each.model, {"submodules": {each.model[2]}} if below else {}, each.optimizer) for each in (ours, theirs)
            ]
            states = [
                outcome(helpers.get_model_state_dict, model, options=Options(**options), **more) for model, more, _ in given
            ]
            check_alike(*states, f"model, below {below}, {options}:")
            states = [
                outcome(helpers.get_optimizer_state_dict, model, optimizer, options=Options(**options), **more)
                for model, more, optimizer in given
            ]
            check_alike(*states, f"optimizer, below {below}, {options}:")


@on_ranks(3, comm=("gloo",))
def test_state_dict_helpers_take_what_they_take_for_pytorchs():
    ours, theirs = (Trained(shard, steps=2) for shard in (fully_shard, torch_fully_shard))
    for options in SETS:
        # What the first rank alone lacks is an error there only, and the others wait.
        for missing in (False,) if options["broadcast_from_rank0"] else (False, True):
            results = []
            for shard, source in ((fully_shard, ours), (torch_fully_shard, theirs)):
                results.append(_set(shard, source, options, missing))
            check_alike(*results, f"missing {missing}, {options}:")


def _set(shard, source, options, missing):
    """The values afterwards, and the loss of a further step; or the error."""
    options = Options(**options)
    model_state, optimizer_state = quietly(
        helpers.get_state_dict,
        source.model,
        source.optimizer,
        options=Options(
            full_state_dict=options.full_state_dict, flatten_optimizer_state_dict=options.flatten_optimizer_state_dict
        ),
    )
    if missing:
        model_state.pop("2.1.bias", None)
    if options.broadcast_from_rank0 and options.full_state_dict and dist.get_rank() != 0:
        model_state, optimizer_state = {}, {}
    target = Trained(shard, seed=3)
    keys = outcome(helpers.set_model_state_dict, target.model, model_state, options=options)
    given = outcome(helpers.set_optimizer_state_dict, target.model, target.optimizer, optimizer_state, options=options)
    if isinstance(keys, type) or isinstance(given, type):
        return [keys if isinstance(keys, type) else None, given]
    values = {name: whole(value) for name, value in target.model.state_dict().items()}
    return [tuple(keys), values, target.step(5)]


@on_ranks(2, comm=("shm",))
def test_names_of_the_file_may_differ():
    """``dsd_fqn_modifiers``, PyTorch's way for a module to have other names in state dicts."""

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 7)

        def forward(self, x):
            return self.inner(x)

        def _fqn_modifiers(self):
            return {"inner": "outer"}

    def state(shard):
        model = nn.Sequential(seeded(Renamed))
        shard(model)
        return quietly(helpers.get_model_state_dict, model, options=Options(dsd_fqn_modifiers="_fqn_modifiers"))

    check_alike(state(fully_shard), state(torch_fully_shard), "")


@on_ranks(2)
def test_async_save_and_files_of_hugging_face(folder=None):
    trained, other = Trained(fully_shard), Trained(fully_shard, seed=3)
    model, optimizer = helpers.get_state_dict(trained.model, trained.optimizer)
    meanwhile = dist.new_group()  # for its own thread's collectives
    saved = {"model": model, "optimizer": optimizer}
    saving = dcp.async_save(saved, checkpoint_id=f"{folder}/async", process_group=meanwhile)
    wanted = {name: whole(value).clone() for name, value in trained.model.state_dict().items()}
    later = trained.step(1)
    saving.result()
    model, optimizer = helpers.get_state_dict(other.model, other.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/async")
    helpers.set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    for name, value in other.model.state_dict().items():
        assert torch.equal(whole(value), wanted[name]), name
    assert torch.equal(other.step(1), later), "the optimizer's state too"
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True, enable_consolidation=True)
    saved, state = dict(trained.model.named_parameters()), dict(other.model.named_parameters())  # the writer has no integers
    dcp.save(saved, storage_writer=writer)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{folder}/hf"))
    for name, value in saved.items():
        assert torch.equal(whole(state[name]), whole(value)), name


def untied():
    """safetensors refuses what is tied."""
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9)), nn.Linear(9, 3))


def state_of_wrapper(model, kind=StateDictType.SHARDED_STATE_DICT):
    with quietly(FullyShardedDataParallel.state_dict_type, model, kind):
        return quietly(model.state_dict)


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
@on_ranks(2, comm=("shm",))
def test_wrappers_too_save_in_the_background_and_in_files_of_hugging_face(folder=None):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    where = dict(device_mesh=init_device_mesh("cpu", (2,)))  # without it there are ShardedTensors, which PyTorch does not stage
    saved, *others = (wrapped(seeded(untied, seed), FSDP, **where) for seed in (1, 2, 3))
    state = state_of_wrapper(saved)
    dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=dist.new_group()).result()
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    readers = dcp.FileSystemReader(f"{folder}/async"), HuggingFaceStorageReader(f"{folder}/hf")
    for model, reader in zip(others, readers, strict=True):
        state = state_of_wrapper(model)
        dcp.load(state, storage_reader=reader)
        with quietly(FullyShardedDataParallel.state_dict_type, model, StateDictType.SHARDED_STATE_DICT):
            quietly(model.load_state_dict, state)
        values, wanted = (state_of_wrapper(each, StateDictType.FULL_STATE_DICT) for each in (model, saved))
        for name, value in wanted.items():
            assert torch.equal(values[name], value), f"{type(reader).__name__} {name}"


class OnAnyRanks(Trained):
    """All ranks see the same, so that their number changes the order of additions at most."""

    def step_alike(self, number):
        loss = loss_of(self.model, torch.randn(4, 5, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def losses_of(trained, begin, end, file):
    values = [trained.step_alike(step).item() for step in range(begin, end)]
    if dist.get_rank() == 0:
        pathlib.Path(file).write_text(repr(values))


@on_ranks(2)
def with_dcp(of_pytorch, begin, end, path, losses, to=None):
    trained = OnAnyRanks(torch_fully_shard if of_pytorch else fully_shard, steps=0)
    if begin > 0:
        model, optimizer = helpers.get_state_dict(trained.model, trained.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        helpers.set_state_dict(trained.model, trained.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    losses_of(trained, begin, end, losses)
    if to is not None:
        model, optimizer = helpers.get_state_dict(trained.model, trained.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "epoch": 4}, checkpoint_id=to)


@on_ranks(3)
def with_libfsdp(begin, end, path, losses, to):
    trained = OnAnyRanks(fully_shard, seed=2, steps=0)
    loaded = libfsdp.load(path, trained.model, trained.optimizer, random_numbers=False)
    assert loaded.extra == {"epoch": 4} and loaded.step == begin
    losses_of(trained, begin, end, losses)
    libfsdp.save(to, trained.model, trained.optimizer, step=end, extra=loaded.extra)


def convert(*arguments):
    """What the tool says."""
    spec = importlib.util.spec_from_file_location("dcp_tool", TOOL)
    spec.loader.exec_module(tool := importlib.util.module_from_spec(spec))
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        tool.main([*map(str, arguments)])
    return said.getvalue()


def test_pytorchs_run_on_2_ranks_goes_on_in_libfsdp_on_3_and_back(tmp_path):
    """By tools/dcp.py, and where both use DCP."""

    def on_ranks(number, body, **arguments):
        run(body, number, "gloo" if number == 2 else "shm", arguments)

    def at(name):
        return str(tmp_path / name)

    def losses(*files):
        return torch.tensor([loss for name in files for loss in eval(pathlib.Path(at(name)).read_text())])

    on_ranks(2, with_dcp, of_pytorch=True, begin=0, end=3, path="", losses=at("a"), to=at("dcp"))
    on_ranks(2, with_dcp, of_pytorch=True, begin=0, end=9, path="", losses=at("all"))
    convert("from-dcp", at("dcp"), at("ours"), "--step", 3)
    on_ranks(3, with_libfsdp, begin=3, end=6, path=at("ours"), losses=at("b"), to=at("ours later"))
    convert("to-dcp", at("ours later"), at("dcp later"))
    on_ranks(3, with_dcp, of_pytorch=False, begin=3, end=6, path=at("dcp"), losses=at("direct b"), to=at("direct"))
    for b, later in (("b", "dcp later"), ("direct b", "direct")):
        on_ranks(2, with_dcp, of_pytorch=True, begin=6, end=9, path=at(later), losses=at("c"))
        torch.testing.assert_close(losses("a", b, "c"), losses("all"), rtol=1e-5, atol=0)


@on_ranks(1, comm=("shm",))
def saves_flattened(folder_of):
    trained = Trained(fully_shard)
    options = Options(flatten_optimizer_state_dict=True)
    model, optimizer = helpers.get_state_dict(trained.model, trained.optimizer, options=options)
    dcp.save({"weights": model, "optim": optimizer, "thing": object}, checkpoint_id=f"{folder_of}/dcp")
    libfsdp.save(f"{folder_of}/direct", trained.model, trained.optimizer, step=7)


def test_states_that_dcp_has_flattened_are_converted(tmp_path):
    run(saves_flattened, 1, "shm", dict(folder_of=str(tmp_path)))
    said = convert(
        "from-dcp", tmp_path / "dcp", tmp_path / "ours", "--model-key", "weights", "--optimizer-key", "optim", "--step", 7
    )
    assert "'thing' (type) is left out" in said
    got, wanted = (libfsdp.SavedCheckpoint(tmp_path / name) for name in ("ours", "direct"))
    names = [name for name in wanted.tensors if name.startswith(("model/", "optimizer/"))]
    assert [name for name in got.tensors if not name.startswith("random/")] == names
    for name in names:
        assert torch.equal(got.read(name), wanted.read(name)), name
    assert (got.step, got.optimizer) == (wanted.step, wanted.optimizer)
    assert os.listdir(tmp_path / "ours") == ["step-00000007"], "what was converted over is gone"


def test_the_tool_says_how_to_use_it():
    result = subprocess.run([sys.executable, TOOL, "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "from-dcp folder runs/b" in result.stdout, result.stderr
