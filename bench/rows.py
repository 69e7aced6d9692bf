"""What a measurement says: one row of the table, one object of results.json."""

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass
class Row:
    name: str
    unit: str
    ours: float
    theirs: float | None = None
    ratio: float | None = None
    target: str | None = None
    met: bool | None = None
    runs: dict[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest ratio of a round."""
        if self.ratio is None:
            return None
        return min(self.runs["ratio"]), max(self.runs["ratio"])


def times_better(name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], target: float | None) -> Row:
    """How many times as much the others take: at least `target`, hopefully. Both measured in turns, round by round."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return _compared(name, unit, ours, theirs, ratios, target, ">=", lambda ratio: ratio >= target)


def at_most(name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], target: float | None) -> Row:
    """Ours as a part of theirs: at most `target`, hopefully."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return _compared(name, unit, ours, theirs, ratios, target, "<=", lambda ratio: ratio <= target)


def reported(name: str, unit: str, ours: Sequence[float]) -> Row:
    return Row(name, unit, statistics.median(ours), runs={"ours": list(ours)})


def _compared(name, unit, ours, theirs, ratios, target, sign, meets) -> Row:
    ratio = statistics.median(ratios)
    return Row(
        name,
        unit,
        statistics.median(ours),
        statistics.median(theirs),
        ratio,
        None if target is None else f"{sign} {target:g}",
        None if target is None else meets(ratio),
        {"ours": list(ours), "theirs": list(theirs), "ratio": ratios},
    )
