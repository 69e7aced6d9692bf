"""Proportional set size: memory as the kernel shares it out among the processes that map it."""

import threading
import time
from collections.abc import Iterator

import rows

ROWS = ["memory_pss_117m_vs_fsdp2", "memory_pss_117m_vs_bound"]
CONTENDERS = ("ours", "fsdp2")
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


def measure(teams: dict, idle: dict[str, int], scenario: str, say) -> Iterator[rows.Row]:
    peaks: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(ROUNDS):
        for name in CONTENDERS:
            say(f"{scenario}: memory of {name}, round {turn + 1} of {ROUNDS}")
            peak = peak_during(teams[name], lambda team=teams[name]: team.ask("steps", count=1))
            peaks[name].append((peak - idle[name]) / MIB)
    against_fsdp2, against_bound = ROWS
    yield rows.times_better(against_fsdp2, "MiB", peaks["ours"], peaks["fsdp2"], 1.35)
    bound = sum(teams["ours"].ask("bound")) / MIB
    yield rows.at_most(against_bound, "MiB", peaks["ours"], [bound] * ROUNDS, 1.05)
