"""The package itself: version, command line, exports, torch.compile."""

import ast
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import libfsdp
from harness import TIMEOUT, on_ranks
from libfsdp import fully_shard
from libfsdp._module import NOT_HERE
from subjects import TORCH_IS_OLD, mine, mlp, rows, seeded, check_same, reference_backward


def command(*arguments):
    result = subprocess.run([sys.executable, "-m", "libfsdp", *arguments], capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_command_line():
    text = command("info")
    assert libfsdp.__version__ in text and torch.__version__ in text and "gloo" in text
    assert "works here" in text
    assert command("--cmake-dir").strip().endswith("lib/cmake/fsdp")


def test_memory_that_another_process_may_not_map_is_said(monkeypatch):
    from libfsdp import __main__ as program

    assert program.shared_memory() == "works here"
    monkeypatch.setattr(program.os, "getpid", lambda: 1 << 30)  # of which there is no process
    assert program.shared_memory().startswith("no (FileNotFoundError")
    monkeypatch.setenv("FSDP_SHM", "0")
    assert program.shared_memory() == "turned off by FSDP_SHM"


def test_what_pytorchs_package_has_as_attributes():
    program = "import libfsdp; libfsdp.wrap.ModuleWrapPolicy, libfsdp.fully_shard, libfsdp.FSDPModule"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_torch_that_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match=r"torch 2\.11 or later, and 2\.10\.1\+cpu is installed"):
        libfsdp._torch.check_torch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch 2\.11 or later, and none is installed"):
        libfsdp._torch.check_torch()


def test_a_build_names_a_torch_that_is_missing_or_too_old(monkeypatch):
    pytest.importorskip("scikit_build_core")
    backend_file = pathlib.Path(__file__).parents[2] / "python" / "backend.py"
    spec = importlib.util.spec_from_file_location("backend", backend_file)
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    found = "2.10.1"

    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match=r"torch 2\.11 or later, and 2\.10\.1 is installed"):
        backend.build_wheel("nowhere")
    found = None
    with pytest.raises(SystemExit, match="--no-build-isolation"):
        backend.build_editable("nowhere")


ALONE = """
import pathlib, sys
import torch, torch.distributed as dist
import libfsdp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
libfsdp.fully_shard(torch.nn.Linear(2, 2))(torch.rand(1, 2)).sum().backward()
mapped = {pathlib.Path(line.split()[-1]) for line in open("/proc/self/maps")}
ours = {path for path in mapped if path.name.startswith("libfsdp.so") or path.parent.name == "libfsdp"}
assert len(ours) == 2 and all(path.is_relative_to(sys.argv[1]) for path in ours), ours
from libfsdp.__main__ import cmake_dir
assert (cmake_dir() / "fsdpConfig.cmake").is_file()
"""


def test_an_installation_works_by_itself(tmp_path, monkeypatch):
    """What a wheel has: the library as CMake installs it, the extension, the Python files."""
    if not os.environ.get("FSDP_BIN"):
        pytest.skip("there is no build to install from (FSDP_BIN)")
    build = pathlib.Path(os.environ["FSDP_BIN"]).resolve().parent
    package = tmp_path / "libfsdp"
    for component in ("Unspecified", "python"):
        install = ["cmake", "--install", build, "--prefix", package, "--component", component]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    if (package / "lib64").exists():
        (package / "lib64").rename(package / "lib")  # where the wheel's build puts it
    shutil.copytree(pathlib.Path(__file__).parents[2] / "python" / "libfsdp", package, dirs_exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], check=True, timeout=TIMEOUT)


def test_exports():
    names = (
        "fully_shard FSDPModule UnshardHandle register_fsdp_forward_method MixedPrecisionPolicy OffloadPolicy "
        "CPUOffloadPolicy share_comm_ctx DataParallelMeshDims describe summon_full_params clip_grad_norm_ trace"
    ).split()
    assert set(names) <= set(libfsdp.__all__)
    for name in names:
        thing = getattr(libfsdp, name)
        assert thing.__doc__, f"{name} has no docstring"


def test_policies_are_pytorchs_from_wherever_they_are_imported():
    from torch.distributed import fsdp
    from torch.distributed._composable import fsdp as former

    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert getattr(libfsdp, name) is getattr(fsdp, name) is getattr(former, name)
    assert issubclass(libfsdp.FSDPModule, former.FSDPModule)


def test_what_only_a_newer_pytorch_has_is_an_error():
    assert torch.__version__ >= (2, 14) or not NOT_HERE
    for name in NOT_HERE:
        with pytest.raises(NotImplementedError, match=name):
            getattr(libfsdp.FSDPModule, name)(None)


def test_signatures_are_pytorchs():
    import inspect

    from torch.distributed import fsdp

    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        ours, theirs = (inspect.signature(getattr(package, name)).parameters for package in (libfsdp, fsdp))
        known = [(p.name, p.kind) for p in ours.values() if p.name in theirs or not TORCH_IS_OLD]
        assert known == [(p.name, p.kind) for p in theirs.values()], name
    for name, method in vars(fsdp.FSDPModule).items():
        if not name.startswith("_") and inspect.isfunction(method) and name not in NOT_HERE:
            ours = inspect.signature(vars(libfsdp.FSDPModule)[name]).parameters
            theirs = inspect.signature(inspect.unwrap(method)).parameters
            assert [(p.name, p.kind, p.default) for p in ours.values()] == [
                (p.name, p.kind, p.default) for p in theirs.values()
            ], name


def test_type_stubs_name_what_is_there():
    stubs = ast.parse(pathlib.Path(libfsdp.__file__).with_name("_C.pyi").read_text()).body
    declared = {node.name: node for node in stubs if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    there = {name for name in vars(libfsdp._C) if not name.startswith("__")}
    assert there - declared.keys() == {"call_sharded"}, "an assignment"
    assert declared.keys() <= there
    for name, node in declared.items():
        thing = getattr(libfsdp._C, name)
        if isinstance(thing, type) and not issubclass(thing, Exception):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            members |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
            public = {member for member in vars(thing) if not member.startswith("_")}
            assert public == {member for member in members if not member.startswith("_")}, name


def test_type_stubs_of_fully_shard_have_its_parameters():
    import inspect

    stub = ast.parse((pathlib.Path(libfsdp.__file__).parent / "_fully_shard.pyi").read_text()).body
    (protocol,) = (node for node in stub if isinstance(node, ast.ClassDef))
    overloads = [item for item in protocol.body if getattr(item, "name", "") == "__call__"]
    expected = list(inspect.signature(fully_shard).parameters)
    for call in overloads:
        names = [argument.arg for argument in (*call.args.args, *call.args.kwonlyargs)]
        assert names == ["self", *expected]
    results = {ast.unparse(call.args.args[1].annotation): ast.unparse(call.returns) for call in overloads}
    assert results == {"nn.Module": "FSDPModule", "list[nn.Module]": "list[FSDPModule]"}
    declared = {node.name for node in stub if isinstance(node, ast.FunctionDef)}
    assert declared == {"register_fsdp_forward_method", "share_comm_ctx"}
    assert {item.name for item in protocol.body if isinstance(item, ast.FunctionDef)} == {"__call__", "state"}


@pytest.mark.skipif(TORCH_IS_OLD, reason="torch 2.11 cannot say what a null pointer was")
@on_ranks(2, comm=("shm",))
def test_generated_kernels_are_an_error_that_says_so():
    model = fully_shard(Block())
    with pytest.raises(RuntimeError, match="Kernels that torch.compile generates read parameters so"):
        torch.compile(model)(mine(rows(0, 5)))


@on_ranks(1, comm=("shm",))
def test_storage_is_not_kept():
    model = fully_shard(nn.Linear(2, 2))
    model.set_keep_unsharded_storage(False)
    with pytest.raises(NotImplementedError, match="units take turns"):
        model.set_keep_unsharded_storage(True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def norms_first():
    return nn.Sequential(Block(), Block(), Block())


@pytest.mark.parametrize("make", [mlp, norms_first])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2, comm=("shm",))
def test_compiled_modules_give_the_same(backend, make):
    def loss_of(model, batch):
        return model(batch).pow(2).mean()

    for compile_what in ("model", "method", "block"):
        reference, model = seeded(make), seeded(make)
        fully_shard(model[2])
        fully_shard(model)
        if compile_what == "model":
            call = torch.compile(model, backend=backend)
        else:
            (model if compile_what == "method" else model[2]).compile(backend=backend)
            call = model
        for step in range(2):
            batch = rows(step, 5)
            assert torch.equal(call(mine(batch)), reference(mine(batch))), compile_what
            loss_of(call, mine(batch)).backward()
            reference_backward(reference, loss_of, batch)
            check_same(model, reference, what="gradients")
            model.zero_grad(), reference.zero_grad()
