"""Rows, for people to read."""

from rows import Row

HEAD = f"{'':38} {'ours':>9} {'theirs':>9} {'unit':8} {'ratio':>7}  {'lowest - highest':17} {'target':8}\n" + "-" * 104


def line(row: Row) -> str:
    theirs = "" if row.theirs is None else number(row.theirs)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    spread = "{:.2f} - {:.2f}".format(*row.spread()) if row.spread() else ""
    verdict = {None: "", True: "met", False: "NOT MET"}[row.met]
    start = f"{row.name:38} {number(row.ours):>9} {theirs:>9} {row.unit:8} {ratio:>7}"
    return f"{start}  {spread:17} {row.target or '':8} {verdict}".rstrip()


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def summary(rows: list[Row]) -> str:
    met, all_targets = sum(row.met is True for row in rows), sum(row.met is not None for row in rows)
    return f"{met} of {all_targets} targets met."
