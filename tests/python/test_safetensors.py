"""Our safetensors files beside those of the Python package `safetensors`, whose files are read, written again, and compared."""

import json
import os
import subprocess

import pytest
import torch
from torch import nn

from harness import TIMEOUT

safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")


def run(program, test, from_path, to_path):
    """A test of a C++ program, which is one of these only: it reads one path and writes to another."""
    paths = {"FSDP_TEST_FROM": str(from_path), "FSDP_TEST_TO": str(to_path)}
    command = [os.path.join(os.environ["FSDP_TESTS"], program), f"--gtest_filter={test}.*", "--gtest_also_run_disabled_tests"]
    result = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr


def copied(folder):
    """The file that C++ writes of what it has read."""
    run("checkpoint_files_test", "SafetensorsOfPython", folder / "from.safetensors", folder / "to.safetensors")
    return folder / "to.safetensors"


def some_tensors():
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ]  # fmt: skip
    tensors = {f"layers.{i}/{dtype}": torch.arange(3 + i).to(dtype) for i, dtype in enumerate(dtypes)}
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "matrix é": torch.randn(5, 7)}


def test_files_are_read_and_written_as_the_package_does(tmp_path):
    tensors = some_tensors()
    safetensors.save_file(tensors, tmp_path / "from.safetensors", metadata={"format": "pt", "note": "some\ntext"})
    path = copied(tmp_path)
    got = safetensors.load_file(path)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert bytes(got[name].view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8)), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "some\ntext"}


def test_a_file_without_tensors(tmp_path):
    safetensors.save_file({}, tmp_path / "from.safetensors")
    assert safetensors.load_file(copied(tmp_path)) == {}


def test_weights_go_into_a_sharded_model_and_out_again(tmp_path):
    weights = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)).state_dict()
    safetensors.save_file(weights, tmp_path / "from.safetensors")
    run("save_test", "ExchangeWithPython", tmp_path / "from.safetensors", tmp_path / "to")
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(safetensors.load_file(tmp_path / "to" / index["weight_map"][name])[name], weight), name
