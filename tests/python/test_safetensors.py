"""Our safetensors files beside those of the Python package `safetensors`, whose files are read, written again, and compared."""

import os
import subprocess

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")


def copied(folder):
    """The file that C++ writes of what it has read of `from`."""
    files = {"FSDP_TEST_FROM": str(folder / "from.safetensors"), "FSDP_TEST_TO": str(folder / "to.safetensors")}
    program = os.path.join(os.environ["FSDP_TESTS"], "checkpoint_files_test")
    arguments = ["--gtest_filter=SafetensorsOfPython.*", "--gtest_also_run_disabled_tests"]
    result = subprocess.run([program, *arguments], env={**os.environ, **files}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return files["FSDP_TEST_TO"]


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
