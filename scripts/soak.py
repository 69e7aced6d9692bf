#!/usr/bin/env python3
"""Runs random trials with fresh seeds until the time is over or one fails; then says how to repeat that one.

    scripts/soak.py --minutes 30
    scripts/soak.py --seed 123456            # the same trials again
    scripts/soak.py --only nn --seed 17 --trials 1

Kinds take turns: `nn` (ranks are threads), `streams` (a simulated device), and `python1-shm` to `python4-gloo` (processes).
"""

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PYTHON = [f"python{ranks}-{means}" for ranks in (1, 2, 3, 4) for means in ("shm", "gloo")]
PATIENCE = 300  # seconds for a batch of trials, of which a rank that is stuck takes 60 to 90


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, help="of the first trials (default: a fresh one)")
    parser.add_argument("--only", choices=["nn", "streams", *PYTHON], help="trials of this kind only")
    parser.add_argument("--trials", type=int, help="so many of one kind, from the seed on, and no more: with --only and --seed")
    arguments = parser.parse_args()
    if arguments.trials and not (arguments.only and arguments.seed is not None):
        parser.error("--trials needs --only and --seed")
    return arguments


def kinds_that_are_built():
    built = [kind for kind, name in (("nn", "random_test"), ("streams", "random_streams_test")) if binary(name).exists()]
    return built + (PYTHON if (BUILD / "python").exists() else [])


def binary(name):
    return BUILD / "tests" / name


def command_of(kind):
    if kind in ("nn", "streams"):
        return [str(binary("random_test" if kind == "nn" else "random_streams_test"))]
    ranks, means = kind[len("python") :].split("-")
    python = os.environ.get("PYTHON") or str(ROOT / ".venv/bin/python")
    test = f"{ROOT}/tests/python/test_random.py::test_random_trials[{ranks}-{means}]"
    return [python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", test]


def run_trials(kind, seed, trials):
    """What a batch of trials said, or None if all is well. No process outlives it."""
    ours = dict(FSDP_TRIALS_SEED=seed, FSDP_TRIALS=trials, OMP_NUM_THREADS=1, PYTHONPATH=BUILD / "python")
    environment = {**os.environ, **{name: str(value) for name, value in ours.items()}}
    process = subprocess.Popen(
        command_of(kind),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=PATIENCE)
        return None if process.returncode == 0 else f"{said}\n(exit status {process.returncode})"
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def failing_seed(said, first):
    found = re.search(r"^seed (\d+):|FSDP_TRIALS_SEED=(\d+)", said, re.MULTILINE)
    return int(found[1] or found[2]) if found else first


def show(text, end=False):
    if sys.stdout.isatty():
        print(f"\r{text}\033[K", end="\n" if end else "", flush=True)
    elif end:
        print(text, flush=True)


def soak(kinds, seed, minutes):
    """True if no trial failed."""
    draw, done, start = random.Random(seed), 0, time.monotonic()
    last_line = start
    while (left := start + minutes * 60 - time.monotonic()) > 0:
        for kind in kinds:
            first, trials = draw.randrange(1, 2**30), 40 if kind in ("nn", "streams") else 10
            said = run_trials(kind, first, trials)
            if said is not None:
                return report(kind, first, trials, said)
            done += trials
            left = max(0, start + minutes * 60 - time.monotonic())
            often = time.monotonic() - last_line > 60
            last_line = time.monotonic() if often else last_line
            show(f"{done} trials, {int(left) // 60}:{int(left) % 60:02} left", end=often)
            if not left:
                break
    show(f"{done} trials, none failed", end=True)
    return True


def report(kind, first, trials, said):
    show("", end=True)
    print(said)
    seed = failing_seed(said, first)
    count = 1 if said.find(str(seed)) >= 0 else trials
    print(f"A trial of kind {kind} failed. To repeat it:\n  scripts/soak.py --only {kind} --seed {seed} --trials {count}")
    return False


def main():
    arguments = parse_arguments()
    if arguments.trials:
        said = run_trials(arguments.only, arguments.seed, arguments.trials)
        print(said or f"{arguments.trials} trials, none failed")
        return 1 if said else 0
    kinds = [arguments.only] if arguments.only else kinds_that_are_built()
    if not kinds:
        print("There is nothing to run yet: make build", file=sys.stderr)
        return 1
    seed = random.SystemRandom().randrange(2**30) if arguments.seed is None else arguments.seed
    print(f"SEED={seed}, {arguments.minutes:g} minutes of {', '.join(kinds)}", flush=True)
    return 0 if soak(kinds, seed, arguments.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
