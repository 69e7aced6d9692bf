"""``python -m libfsdp info`` and ``python -m libfsdp --cmake-dir``."""

import argparse
import errno
import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist

from . import __version__


def cmake_dir() -> pathlib.Path:
    """Where ``find_package(fsdp)`` finds the C++ library of this installation."""
    return pathlib.Path(__file__).parent / "lib" / "cmake" / "fsdp"


def devices() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return f"cpu ({os.cpu_count()} cores)"
    return f"cpu, {accelerator.type} ({torch.accelerator.device_count()})"


def backends() -> str:
    found = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return ", ".join(name for name, available in found.items() if available()) or "none"


def _open_in_a_child(path: str) -> None:
    child = subprocess.run([sys.executable, "-I", "-c", f"open({path!r}).close()"], capture_output=True, text=True)
    if child.returncode != 0:
        raise OSError((child.stderr.strip().splitlines() or ["a child process failed"])[-1])


def _memory_file() -> int:
    """Which cannot be executed, as some systems want it (vm.memfd_noexec); older ones do not know the word."""
    noexec_seal = 8
    try:
        return os.memfd_create("fsdp-probe", os.MFD_CLOEXEC | noexec_seal)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("fsdp-probe")


def shared_memory() -> str:
    """Whether another process may map memory of this one, which is what the shared-memory group needs."""
    if os.environ.get("FSDP_SHM", "").lower() in ("0", "false", "off", "no"):
        return "turned off by FSDP_SHM"
    try:
        descriptor = _memory_file()
        try:
            _open_in_a_child(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return f"no ({error})"
    return "works here"


def info() -> str:
    rows = {
        "libfsdp": f"{__version__} ({pathlib.Path(__file__).parent})",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "devices": devices(),
        "backends": backends(),
        "shared memory": shared_memory(),
    }
    return "\n".join(f"{name + ':':<15}{value}" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m libfsdp")
    parser.add_argument("command", nargs="?", choices=["info"], help="what this installation and this machine have")
    parser.add_argument("--cmake-dir", action="store_true", help="the folder for CMake's find_package(fsdp)")
    arguments = parser.parse_args()
    if arguments.cmake_dir:
        print(cmake_dir())
    elif arguments.command == "info":
        print(info())
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
