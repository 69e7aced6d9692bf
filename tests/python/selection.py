"""A few of all combinations of options, in which as many options as wanted meet in every way that they can."""

import itertools
import os

ALL = os.environ.get("FSDP_ALL_COMBINATIONS") == "1"  # nothing is left out


def meetings_of(row, together):
    return set(itertools.combinations(enumerate(row), together))


def selected(rows, together):
    """`rows`: the options' values, of each combination. Takes that next in which most meet for the first time."""
    if ALL:
        return rows
    assert all(len(row) >= together for row in rows)
    meetings = [meetings_of(row, together) for row in rows]
    some, met = [], set()
    while True:
        count, best = max((len(meetings[i] - met), -i) for i in range(len(rows)))
        if not count:
            return some
        met |= meetings[-best]
        some.append(rows[-best])
