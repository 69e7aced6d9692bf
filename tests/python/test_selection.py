"""Of options in all their combinations some are left out, and no meeting of as many as wanted."""

import itertools

import pytest

from selection import ALL, meetings_of, selected

ROWS = list(itertools.product(range(3), "ab", [None, True], range(3)))
RAN = []


def meetings(rows, together):
    return set().union(*(meetings_of(row, together) for row in rows))


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_so_many_meet_in_every_way(together):
    some = selected(ROWS, together)
    assert meetings(some, together) == meetings(ROWS, together)
    assert ALL or together == 4 or len(some) < len(ROWS)


@pytest.mark.meet(2)
@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("two", "ab")
@pytest.mark.parametrize("three", [[], [1]])
@pytest.mark.parametrize("four", range(3))
def test_that_is_marked(one, two, three, four):
    RAN.append((one, two, len(three), four))


def test_of_what_is_marked_some_has_run():
    rows = list(itertools.product(range(3), "ab", range(2), range(3)))
    if not RAN:
        pytest.skip("none was to run")
    assert meetings(RAN, 2) == meetings(rows, 2)
    assert len(RAN) == len(rows) if ALL else len(RAN) < len(rows) / 2
