"""Runs example programs as ranks. FSDP_BIN is the folder with the programs."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FSDP_BIN", ROOT / "build" / "bin"))
LAUNCH = ROOT / "scripts" / "launch"
PATIENCE = 300  # seconds, with programs on a machine that does much else
# Of LibTorch, to a rank that others come to late, or that is the last to leave.
SLOW_RANKS = re.compile(r"\[W[^\]]*(?:socket|TCPStore)\.cpp:\d+\].*?(?=^\[[WE]|\Z)", re.S | re.M)
sys.path.append(str(ROOT / "tests" / "scripts"))

import results  # noqa: E402


def environment(**more):
    """One thread a rank: with another number of threads, sums come in another order."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def command(program, *arguments, ranks=1):
    launcher = [LAUNCH, "--ranks", ranks] if ranks > 1 else []
    return [str(word) for word in [*launcher, BIN / program, *arguments]]


def run(program, *arguments, ranks=1, **more):
    return subprocess.run(
        command(program, *arguments, ranks=ranks), env=environment(**more), capture_output=True, text=True, timeout=PATIENCE
    )


run_tests = results.run
