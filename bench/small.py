"""Everything that is measured beside whole training steps: host time, collectives, the time until the first step."""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import rows
import steps
from team import Team

HERE = pathlib.Path(__file__).parent
MICROSECONDS = 1e6
MILLISECONDS = 1e3


@dataclasses.dataclass(frozen=True)
class Host:
    """`seconds` of host time a unit, of one contender in one setting."""

    units: int = 200
    linears: int = 1
    world: int = 8

    def of(self, contender: str, build: pathlib.Path) -> float:
        compiled = contender in ("ours", "ours_fsdp1")
        command = [str(build / "bin" / "bench_host")] if compiled else [sys.executable, str(HERE / "host.py"), contender]
        request = dataclasses.asdict(self) | {"repeats": max(3, 4000 // self.units), "fsdp1": contender == "ours_fsdp1"}
        with Team(command, [{}], {"FSDP_CHECK_ORDER": 0, "FSDP_SHM": 0}).ready() as team:
            extra = team.ask("per_unit", **request)[0]
        return sorted(extra)[len(extra) // 2] * MICROSECONDS


def compare_hosts(name, ours: str, theirs: str, one: Host, other: Host, compare, target) -> Callable:
    def measure(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
        samples: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(3):
            say(f"{name}: round {turn + 1} of 3")
            samples["ours"].append(one.of(ours, build))
            samples["theirs"].append(other.of(theirs, build))
        yield compare(name, "us/unit", samples["ours"], samples["theirs"], target)

    return measure


def touch(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    with Team([str(build / "bin" / "bench_host")], [{}]).ready() as team:
        yield rows.reported("touch_ns", "ns", [1e9 * seconds for seconds in team.ask("touch", repeats=15)[0]])


def collectives(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    commands = {"ours": [str(build / "bin" / "bench_collectives")], "gloo": [sys.executable, str(HERE / "collectives.py")]}
    barriers: dict[str, list[float]] = {"ours": [], "gloo": []}
    with contextlib.ExitStack() as stack:
        teams = {name: stack.enter_context(Team(command, [{}, {}])).ready() for name, command in commands.items()}
        for mebibytes in (1, 16, 64):
            rounds: dict[str, list[dict]] = {"ours": [], "gloo": []}
            for turn in range(5):
                say(f"collectives of {mebibytes} MiB, round {turn + 1} of 5")
                for name, team in teams.items():
                    rounds[name].append(slowest(team.ask("measure", mebibytes=mebibytes, times=5)))
                    barriers[name].append(rounds[name][-1]["barrier"] * MICROSECONDS)
            yield from compare_collectives(mebibytes, rounds["ours"], rounds["gloo"])
    yield rows.times_better("barrier_us_vs_gloo", "us", barriers["ours"], barriers["gloo"], None)


def slowest(answers: list[dict]) -> dict:
    return {what: max(answer[what] for answer in answers) for what in answers[0]}


def compare_collectives(mebibytes: int, ours: list[dict], gloo: list[dict]) -> Iterator[rows.Row]:
    def milliseconds(samples: list[dict], what: str) -> list[float]:
        return [MILLISECONDS * sample[what] for sample in samples]

    for what in ("all_gather", "reduce_scatter"):
        name = f"{what}_{mebibytes}MiB_vs_gloo"
        yield rows.times_better(name, "ms", milliseconds(ours, what), milliseconds(gloo, what), 5.0)
    if mebibytes == 64:
        yield rows.reported("unshard_64MiB_us", "us", [MICROSECONDS * sample["unshard"] for sample in ours])
        reduced, copied = milliseconds(ours, "reduce_scatter"), milliseconds(ours, "memcpy")
        yield rows.at_most("reduce_64MiB_vs_memcpy", "ms", reduced, copied, 1.5)


def trace_off(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    """A step beside what it would take without the spans that record nothing: as many as a traced step records."""
    scenario = steps.Scenario("trace_off", **steps.SMALL, compared=())
    work = steps.Work(scenario, scratch)
    say("tracing that is off: spans of a step")
    with work.team("traced", build).ready() as team:
        team.ask("start")
        events = []
        for count in (4, 8):  # after the first step, which learns the schedule
            team.ask("steps", count=count)
            events.append(work.trace.with_name("trace.rank0.json").read_text().count('"ph":"'))
        a_step = (events[1] - events[0]) / 8
    with Team([str(build / "bin" / "bench_span")], [{}]).ready() as spans, work.team("ours", build).ready() as team:
        team.ask("start")
        team.ask("steps", count=2)
        with_spans = [MILLISECONDS * max(answer["seconds"] for answer in team.ask("steps", count=4)) for _ in range(5)]
        cost = [MILLISECONDS * a_step * spans.ask("span")[0] for _ in range(5)]
    without = [milliseconds - spent for milliseconds, spent in zip(with_spans, cost, strict=True)]
    yield rows.at_most("trace_off_overhead", "ms/step", with_spans, without, 1.01)


def first_step(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    """From the start of the processes to the end of the first step, of the GPT with 34 M parameters."""
    scenario = steps.Scenario("init", **steps.MIDDLE, compared=())
    work = steps.Work(scenario, scratch)
    seconds: dict[str, list[float]] = {"ours": [], "fsdp2": []}
    for turn in range(3):
        for contender in seconds:
            say(f"from process start to the first step: {contender}, round {turn + 1} of 3")
            start = time.perf_counter()
            with work.team(contender, build).ready() as team:
                team.ask("start")
                team.ask("steps", count=1)
                seconds[contender].append(time.perf_counter() - start)
    yield rows.times_better("init_vs_fsdp2", "s", seconds["ours"], seconds["fsdp2"], 3.0)


def sharding(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    """`fully_shard` alone, of 1000 parameters in 50 units."""
    work = steps.Work(steps.Scenario("sharding", **steps.SMALL, compared=()), scratch)
    milliseconds: dict[str, list[float]] = {"ours": [], "fsdp2": []}
    for turn in range(3):
        for contender in milliseconds:
            say(f"fully_shard of 1000 parameters: {contender}, round {turn + 1} of 3")
            with work.team(contender, build).ready() as team:
                milliseconds[contender].append(max(team.ask("shard")) * MILLISECONDS)
    yield rows.times_better("fully_shard_1000_vs_fsdp2", "ms", milliseconds["ours"], milliseconds["fsdp2"], 3.0)


COLLECTIVE_ROWS = [f"{what}_{size}MiB_vs_gloo" for size in (1, 16, 64) for what in ("all_gather", "reduce_scatter")]

MEASUREMENTS: list[tuple[list[str], Callable]] = [
    (
        ["host_us_per_unit_vs_fsdp2"],
        compare_hosts("host_us_per_unit_vs_fsdp2", "ours", "fsdp2", Host(), Host(), rows.times_better, 20.0),
    ),
    (
        ["host_us_per_unit_6_linears_vs_fsdp2"],
        compare_hosts(
            "host_us_per_unit_6_linears_vs_fsdp2",
            "ours",
            "fsdp2",
            Host(linears=6),
            Host(linears=6),
            rows.times_better,
            20.0,
        ),
    ),
    (
        ["host_growth_world"],
        compare_hosts("host_growth_world", "ours", "ours", Host(world=4096), Host(), rows.at_most, 1.1),
    ),
    (
        ["host_growth_units"],
        compare_hosts("host_growth_units", "ours", "ours", Host(units=2000), Host(), rows.at_most, 1.1),
    ),
    (["touch_ns"], touch),
    (["trace_off_overhead"], trace_off),
    ([*COLLECTIVE_ROWS, "unshard_64MiB_us", "reduce_64MiB_vs_memcpy", "barrier_us_vs_gloo"], collectives),
    (["init_vs_fsdp2"], first_step),
    (["fully_shard_1000_vs_fsdp2"], sharding),
    (
        ["python_host_us_per_unit_vs_fsdp2"],
        compare_hosts("python_host_us_per_unit_vs_fsdp2", "python", "fsdp2", Host(), Host(), rows.times_better, 20.0),
    ),
    (
        ["fsdp1_host_us_per_unit_vs_fsdp1"],
        compare_hosts("fsdp1_host_us_per_unit_vs_fsdp1", "ours_fsdp1", "fsdp1", Host(), Host(), rows.times_better, 20.0),
    ),
    (
        ["python_fsdp1_host_us_per_unit_vs_fsdp1"],
        compare_hosts(
            "python_fsdp1_host_us_per_unit_vs_fsdp1", "python_fsdp1", "fsdp1", Host(), Host(), rows.times_better, 20.0
        ),
    ),
]
