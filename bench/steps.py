"""Training steps: every contender trains the same GPT from the same weights on the same tokens, in turns."""

import contextlib
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterator

import memory
import rows
from team import Failed, Team

LOSSES_AGREE = 1e-4
STEPS_OF_TOKENS = 16
CEILINGS = ("compute", "ours")
"""What ours should hardly take longer than; all others should take several times as long as ours."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One training set-up, and what is compared in it: (row's suffix, contender, target)."""

    name: str
    width: int
    layers: int
    batch: int
    compared: tuple[tuple[str, str, float | None], ...]
    ours: str = "ours"
    sequence: int = 128
    ranks: int = 2
    param_dtype: str = ""
    accumulate: int = 1
    offload: bool = False
    rounds: int = 4
    memory: bool = False

    def row_name(self, suffix: str) -> str:
        prefix = "python_" if self.ours == "python" else ""
        return f"{prefix}{self.name}{suffix}"


BIG = {"width": 1024, "layers": 8, "batch": 1}
MIDDLE = {"width": 512, "layers": 8, "batch": 2}
SMALL = {"width": 128, "layers": 15, "batch": 1}
"""5.1 M parameters: 8192 x 128 twice, and 15 blocks of 0.2 M."""


def scenarios() -> list[Scenario]:
    return [
        Scenario(
            "step_117m",
            **BIG,
            compared=(
                ("_2ranks_vs_fsdp2", "fsdp2", 3.8),
                ("_2ranks_vs_fsdp1", "fsdp1", 3.5),
                ("_2ranks_vs_ddp", "ddp", 1.8),
                ("_vs_compute", "compute", 1.0),
            ),
            memory=True,
        ),
        Scenario(
            "step_34m",
            **MIDDLE,
            compared=(
                ("_2ranks_vs_fsdp2", "fsdp2", 2.7),
                ("_2ranks_vs_fsdp1", "fsdp1", 2.4),
                ("_2ranks_vs_ddp", "ddp", 1.5),
                ("_vs_compute", "compute", 1.0),
            ),
            rounds=7,
        ),
        Scenario("step_34m_1rank", **MIDDLE, ranks=1, rounds=7, compared=(("_vs_compute", "compute", 1.03),)),
        Scenario("step_117m_4ranks", **BIG, ranks=4, rounds=2, compared=(("_vs_fsdp2", "fsdp2", 3.0),)),
        Scenario("step_117m_bf16", **BIG, param_dtype="bfloat16", rounds=2, compared=(("_vs_fsdp2", "fsdp2", 2.5),)),
        Scenario("step_117m_accumulate4", **BIG, accumulate=4, rounds=2, compared=(("_vs_fsdp2", "fsdp2", None),)),
        Scenario("step_117m_offload", **BIG, offload=True, rounds=2, compared=(("_vs_fsdp2", "fsdp2", None),)),
        Scenario("small_step", **SMALL, rounds=9, compared=(("", "fsdp2", 4.0),)),
        Scenario("trace_on_overhead", **SMALL, ours="traced", rounds=15, compared=(("", "ours", 1.05),)),
        Scenario("step_117m", **BIG, ours="python", compared=(("_vs_fsdp2", "fsdp2", 3.5),)),
        Scenario("step_34m", **MIDDLE, ours="python", rounds=7, compared=(("_vs_fsdp2", "fsdp2", 2.4),)),
        Scenario("small_step", **SMALL, ours="python", rounds=9, compared=(("_vs_fsdp2", "fsdp2", 5.0),)),
    ]


def names(scenario: Scenario) -> list[str]:
    memory_rows = ["memory_pss_117m_vs_fsdp2", "memory_pss_117m_vs_bound"] if scenario.memory else []
    return [scenario.row_name(suffix) for suffix, _, _ in scenario.compared] + memory_rows


class Work:
    """The weights and tokens of a scenario, in files that all contenders read."""

    def __init__(self, scenario: Scenario, folder: pathlib.Path):
        import torch
        from gpt import GPT, VOCABULARY, save_weights

        self.scenario = scenario
        self.weights = folder / f"weights_{scenario.width}_{scenario.layers}.bin"
        self.tokens = folder / "tokens.bin"
        self.trace = folder / "trace.json"
        if not self.weights.exists():
            torch.manual_seed(0)
            save_weights(GPT(scenario.width, scenario.layers, scenario.sequence), str(self.weights))
        self.shape = [
            STEPS_OF_TOKENS,
            scenario.ranks,
            scenario.accumulate,
            scenario.batch,
            scenario.sequence + 1,
        ]
        generator = torch.Generator().manual_seed(1)
        self.tokens.write_bytes(torch.randint(VOCABULARY, self.shape, generator=generator).numpy().tobytes())

    def team(self, contender: str, build: pathlib.Path) -> Team:
        worker = pathlib.Path(__file__).with_name("step.py")
        compiled = contender in ("ours", "traced", "compute")
        command = [str(build / "bin" / "bench_step")] if compiled else [sys.executable, str(worker)]
        fields = ("width", "layers", "sequence", "param_dtype", "offload", "ranks")
        task = {field: getattr(self.scenario, field) for field in fields}
        environment = {"FSDP_TRACE": self.trace} if contender == "traced" else {}
        task |= {"contender": "ours" if contender == "traced" else contender, "weights": str(self.weights), "tokens": str(self.tokens)}
        task |= {"tokens_shape": self.shape}
        return Team(command, [{**task, "rank": rank} for rank in range(self.scenario.ranks)], environment)


def measure(scenario: Scenario, wanted: Callable[[str], bool], build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator:
    work = Work(scenario, scratch)
    compared = [entry for entry in scenario.compared if wanted(scenario.row_name(entry[0]))]
    with_memory = scenario.memory and any(wanted(name) for name in names(scenario)[len(scenario.compared) :])
    contenders = [scenario.ours, *dict.fromkeys(contender for _, contender, _ in compared)]
    if with_memory and "fsdp2" not in contenders:
        contenders.append("fsdp2")
    with contextlib.ExitStack() as stack:
        teams, idle = {}, {}
        for contender in contenders:
            teams[contender] = stack.enter_context(work.team(contender, build)).ready()
            idle[contender] = memory.pss(teams[contender].pids())
            teams[contender].ask("start")
        seconds = take_turns(teams, scenario, say) if compared else {}
        for suffix, contender, target in compared:
            compare = rows.at_most if contender in CEILINGS else rows.times_better
            milliseconds = [[1e3 * second for second in seconds[name]] for name in (scenario.ours, contender)]
            yield compare(scenario.row_name(suffix), "ms/step", *milliseconds, target)
        if with_memory:
            yield from memory.measure(teams, idle, scenario, say)


def take_turns(teams: dict[str, Team], scenario: Scenario, say) -> dict[str, list[float]]:
    """Seconds a step, by contender and round. The first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    for turn in range(scenario.rounds + 1):
        losses = {}
        for name, team in teams.items():
            say(f"{scenario.name}: {name}, round {turn} of {scenario.rounds}")
            answers = team.ask("steps", count=2)
            losses[name] = [answer["losses"] for answer in answers]
            if turn > 0:
                seconds[name].append(max(answer["seconds"] for answer in answers))
        expect_agreement(scenario, losses)
    return seconds


def expect_agreement(scenario: Scenario, losses: dict[str, list[list[float]]]) -> None:
    """Contenders that do not compute the same are not compared. ("compute" updates each rank's share only.)"""
    reference = losses[scenario.ours]
    for name, theirs in losses.items():
        for a, b in zip(sum(reference, []), sum(theirs, []), strict=True):
            if name != "compute" and not math.isclose(a, b, rel_tol=LOSSES_AGREE):
                raise Failed(f"{scenario.name}: the loss of {name} is {b}, that of {scenario.ours} {a}")
