"""Proportional set size: memory as the kernel shares it out among the processes that map it."""

import threading
import time
from collections.abc import Iterator

import rows

STEPS = 2
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


def measure(teams: dict, idle: dict[str, int], scenario, say) -> Iterator[rows.Row]:
    peaks = {}
    for name in (scenario.ours, "fsdp2"):
        say(f"{scenario.name}: memory of {name}")
        peak = peak_during(teams[name], lambda team=teams[name]: team.ask("steps", count=STEPS))
        peaks[name] = (peak - idle[name]) / MIB
    yield rows.times_better("memory_pss_117m_vs_fsdp2", "MiB", [peaks[scenario.ours]], [peaks["fsdp2"]], 1.35)
    bound = sum(teams[scenario.ours].ask("bound")) / MIB
    yield rows.at_most("memory_pss_117m_vs_bound", "MiB", [peaks[scenario.ours]], [bound], 1.05)
