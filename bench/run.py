"""Measures libfsdp beside PyTorch, on this machine, in one run, in turns.

    make bench                         # everything, about 15 minutes on two cores
    make bench ONLY=step_34m           # the rows whose names contain this
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import disk
import rows
import small
import steps
import table
from team import Failed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures libfsdp beside PyTorch's FSDP2, FSDP1 and DDP, in turns.")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose names contain NAME (default: all)")
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"), help="default: build")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    return parser.parse_args()


def measurements(wanted: Callable[[str], bool]) -> list[tuple[list[str], Callable]]:
    """(names of its rows, what measures them), of those in which some row is wanted"""

    def of(scenario: steps.Scenario) -> Callable:
        return lambda build, scratch, say: steps.measure(scenario, wanted, build, scratch, say)

    everything = [(steps.names(scenario), of(scenario)) for scenario in steps.scenarios()] + small.MEASUREMENTS + disk.MEASUREMENTS
    return [(names, measure) for names, measure in everything if any(map(wanted, names))]


def chooser(only: str) -> Callable[[str], bool]:
    has_package = importlib.util.find_spec("libfsdp")
    if not has_package:
        print("The Python package is not built for this Python: rows named python_... are left out.", file=sys.stderr)
    return lambda name: only in name and (has_package or not name.startswith("python_"))


class Progress:
    """What is being measured, in one line that the next replaces; nothing where nobody looks."""

    def __init__(self, count: int):
        self.count, self.done, self.start = count, 0, time.monotonic()

    def __call__(self, what: str) -> None:
        if sys.stderr.isatty():
            minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
            print(f"\r\033[K[{self.done + 1}/{self.count}] {minutes}:{seconds:02d} {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def measure_all(arguments: argparse.Namespace) -> Iterator[rows.Row]:
    wanted = chooser(arguments.only)
    chosen = measurements(wanted)
    say = Progress(len(chosen))
    with tempfile.TemporaryDirectory() as scratch:
        for say.done, (_, measure) in enumerate(chosen):
            for row in measure(arguments.build.resolve(), pathlib.Path(scratch), say):
                say.clear()
                if wanted(row.name):
                    yield row


def cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine() -> dict:
    import torch

    return {
        "name": "machine",
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": 1,
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(name for names, _ in measurements(lambda _: True) for name in names))
        return 0
    results: list[rows.Row] = []
    file = arguments.build / "bench" / "results.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    print(table.HEAD)
    try:
        for row in measure_all(arguments):
            results.append(row)
            print(table.line(row), flush=True)
            file.write_text(json.dumps([*map(dataclasses.asdict, results), machine()], indent=1) + "\n")
    except Failed as failure:
        print(f"\nThe benchmark failed.\n{failure}", file=sys.stderr)
        return 1
    if not results:
        print(f"no row is named like '{arguments.only}': --list names them", file=sys.stderr)
        return 2
    print(f"\n{table.summary(results)}\nAll samples: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
