"""Training steps: every contender trains the same GPT from the same weights on the same tokens, in turns."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import memory
import rows
from team import Failed, Team

LOSSES_AGREE = 1e-4
STEPS_OF_TOKENS = 16
SLOW_STEP_SECONDS = 3
"""A contender that takes longer than that is measured one step a turn; quicker ones take two."""
ENOUGH_SECONDS = 75
"""After that long no new round begins. Where one round takes that long, the first one counts, warm-up or not."""


class Compared(NamedTuple):
    """A row: one contender beside another."""

    name: str
    theirs: str
    target: float | None = None
    ours: str = "ours"
    compare: Callable[..., rows.Row] = rows.times_better


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One training set-up, and what is compared in it."""

    name: str
    width: int
    layers: int
    batch: int
    compared: tuple[Compared, ...] = ()
    sequence: int = 128
    ranks: int = 2
    param_dtype: str = ""
    accumulate: int = 1
    offload: bool = False
    rounds: int = 4
    memory_rows: tuple[memory.Compared, ...] = ()


BIG = {"width": 1024, "layers": 8, "batch": 1}
MIDDLE = {"width": 512, "layers": 8, "batch": 2}
SMALL = {"width": 128, "layers": 15, "batch": 1}
"""5.1 M parameters: 8192 x 128 twice, and 15 blocks of 0.2 M."""


def scenarios() -> list[Scenario]:
    at_most = {"compare": rows.at_most}
    in_python = {"ours": "python"}
    return [
        Scenario(
            "117 M",
            **BIG,
            compared=(
                Compared("step_117m_2ranks_vs_fsdp2", "fsdp2", 3.8),
                Compared("step_117m_2ranks_vs_fsdp1", "fsdp1", 3.5),
                Compared("step_117m_2ranks_vs_ddp", "ddp", 1.8),
                Compared("step_117m_vs_compute", "compute", 1.0, **at_most),
                Compared("python_step_117m_vs_fsdp2", "fsdp2", 3.5, **in_python),
            ),
            memory_rows=(
                memory.Compared("memory_pss_117m_vs_fsdp2", "fsdp2", 1.35),
                memory.Compared("memory_pss_117m_vs_bound", memory.BOUND, 1.05),
            ),
        ),
        Scenario(
            "117 M, FSDP1",
            **BIG,
            compared=(
                Compared("fsdp1_step_117m_vs_fsdp1", "fsdp1", ours="ours_fsdp1"),
                Compared("fsdp1_step_117m_vs_fully_shard", "ours", 1.05, ours="ours_fsdp1", **at_most),
                Compared("python_fsdp1_step_117m_vs_fsdp1", "fsdp1", ours="python_fsdp1"),
            ),
            memory_rows=(memory.Compared("fsdp1_memory_vs_fsdp1", "fsdp1", 1.3, ours="ours_fsdp1"),),
        ),
        Scenario(
            "34 M",
            **MIDDLE,
            rounds=7,
            compared=(
                Compared("step_34m_2ranks_vs_fsdp2", "fsdp2", 2.7),
                Compared("step_34m_2ranks_vs_fsdp1", "fsdp1", 2.4),
                Compared("step_34m_2ranks_vs_ddp", "ddp", 1.5),
                Compared("step_34m_vs_compute", "compute", 1.0, **at_most),
                Compared("python_step_34m_vs_fsdp2", "fsdp2", 2.4, **in_python),
            ),
        ),
        one("step_34m_1rank_vs_compute", "compute", 1.03, **at_most)(**MIDDLE, ranks=1, rounds=7),
        one("step_117m_4ranks_vs_fsdp2", "fsdp2", 3.0)(**BIG, ranks=4, rounds=3),
        one("step_117m_bf16_vs_fsdp2", "fsdp2", 2.5)(**BIG, param_dtype="bfloat16", rounds=3),
        one("step_117m_accumulate4_vs_fsdp2", "fsdp2")(**BIG, accumulate=4, rounds=3),
        one("step_117m_offload_vs_fsdp2", "fsdp2")(**BIG, offload=True, rounds=3),
        Scenario(
            "5 M",
            **SMALL,
            rounds=15,
            compared=(
                Compared("small_step", "fsdp2", 4.0),
                Compared("small_step_vs_compute", "compute", **at_most),
                Compared("python_small_step_vs_fsdp2", "fsdp2", 5.0, **in_python),
                Compared("trace_on_overhead", "ours", 1.05, ours="traced", **at_most),
            ),
        ),
    ]


def one(*compared, **how) -> Callable[..., Scenario]:
    """A scenario of one row, which bears its name."""
    return functools.partial(Scenario, compared[0], compared=(Compared(*compared, **how),))


def names(scenario: Scenario) -> list[str]:
    return [row.name for row in (*scenario.compared, *scenario.memory_rows)]


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

    def team(self, contender: str, build: pathlib.Path, program: str = "step") -> Team:
        worker = pathlib.Path(__file__).with_name(f"{program}.py")
        compiled = contender in ("ours", "ours_fsdp1", "traced", "compute")
        command = [str(build / "bin" / f"bench_{program}")] if compiled else [sys.executable, str(worker)]
        fields = ("width", "layers", "sequence", "param_dtype", "offload", "ranks")
        task = {field: getattr(self.scenario, field) for field in fields}
        environment = {"FSDP_TRACE": self.trace} if contender == "traced" else {}
        task |= {"contender": "ours" if contender == "traced" else contender, "weights": str(self.weights), "tokens": str(self.tokens)}
        task |= {"tokens_shape": self.shape}
        return Team(command, [{**task, "rank": rank} for rank in range(self.scenario.ranks)], environment)


def measure(scenario: Scenario, wanted: Callable[[str], bool], build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator:
    work = Work(scenario, scratch)
    compared = [row for row in scenario.compared if wanted(row.name)]
    of_memory = [row for row in scenario.memory_rows if wanted(row.name)]
    contenders = dict.fromkeys(name for row in compared for name in (row.ours, row.theirs))
    contenders |= dict.fromkeys(memory.contenders(of_memory))
    with contextlib.ExitStack() as stack:
        teams = {}
        for contender in contenders:
            say(f"{scenario.name}: {contender} starts")
            teams[contender] = stack.enter_context(work.team(contender, build)).ready()
        idle = {name: memory.pss(team.pids()) for name, team in teams.items()}  # once all are there to share pages
        for contender, team in teams.items():
            say(f"{scenario.name}: {contender} shards the model")
            team.ask("start")
        seconds = take_turns(teams, scenario, say) if compared else {}
        for row in compared:
            milliseconds = [[1e3 * second for second in seconds[name]] for name in (row.ours, row.theirs)]
            yield row.compare(row.name, "ms/step", *milliseconds, row.target)
        yield from memory.measure(of_memory, teams, idle, scenario.name, say)


def take_turns(teams: dict[str, Team], scenario: Scenario, say) -> dict[str, list[float]]:
    """Seconds a step, by contender and round. The first round warms up."""
    rounds: list[dict[str, float]] = []
    steps_a_turn = 1
    start = time.monotonic()
    while len(rounds) <= scenario.rounds and time.monotonic() - start < ENOUGH_SECONDS:
        rounds.append({})
        losses = {}
        for name, team in teams.items():
            say(f"{scenario.name}: {name}, round {len(rounds) - 1} of {scenario.rounds}")
            answers = team.ask("steps", count=steps_a_turn)
            losses[name] = [answer["losses"] for answer in answers]
            rounds[-1][name] = max(answer["seconds"] for answer in answers)
        expect_agreement(scenario, losses)
        steps_a_turn = 1 if max(rounds[-1].values()) > SLOW_STEP_SECONDS else 2
    measured = rounds[1:] or rounds
    return {name: [turn[name] for turn in measured] for name in teams}


def expect_agreement(scenario: Scenario, losses: dict[str, list[list[float]]]) -> None:
    """Contenders that do not compute the same are not compared. ("compute" updates each rank's share only.)"""
    first, reference = next(iter(losses.items()))
    for name, theirs in losses.items():
        for a, b in zip(sum(reference, []), sum(theirs, []), strict=True):
            if name != "compute" and not is_same_loss(a, b):
                raise Failed(f"{scenario.name}: the loss of {name} is {b}, that of {first} {a}")


def is_same_loss(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=LOSSES_AGREE)
