"""Units of tiny layers: what they take is the work around the computing. As bench/linear_units.h."""

from torch import nn

WIDTH = 16


def make_units(units: int, linears: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(linears))) for _ in range(units)))
