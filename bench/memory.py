"""Proportional set size: memory as the kernel shares it out among the processes that map it."""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import rows


class Compared(NamedTuple):
    """A row: the memory of one contender beside that of another, or beside what the design allows it."""

    name: str
    theirs: str
    target: float
    ours: str = "ours"


BOUND = "bound"
ROUNDS = 3
MIB = 1 << 20


def pss(pids: list[int]) -> int:
    return sum(_pss_of(pid) for pid in pids)


def _pss_of(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return 1024 * next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))


def peak_during(team, action) -> int:
    """The largest sum over the team's ranks while `action` runs."""
    highest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.is_set():
            highest = max(highest, pss(team.pids()))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        stop.set()
        watcher.join()
    return highest


def contenders(compared: Iterable[Compared]) -> list[str]:
    return [name for row in compared for name in (row.ours, row.theirs) if name != BOUND]


def measure(compared: Iterable[Compared], teams: dict, idle: dict[str, int], scenario: str, say) -> Iterator[rows.Row]:
    peaks: dict[str, list[float]] = {name: [] for name in contenders(compared)}
    for turn in range(ROUNDS):
        for name in peaks:
            say(f"{scenario}: memory of {name}, round {turn + 1} of {ROUNDS}")
            peak = peak_during(teams[name], lambda team=teams[name]: team.ask("steps", count=1))
            peaks[name].append((peak - idle[name]) / MIB)
    for row in compared:
        if row.theirs == BOUND:
            bound = sum(teams[row.ours].ask("bound")) / MIB
            yield rows.at_most(row.name, "MiB", peaks[row.ours], [bound] * ROUNDS, row.target)
        else:
            yield rows.times_better(row.name, "MiB", peaks[row.ours], peaks[row.theirs], row.target)
