"""The equality of a group's rewards, for all code that compares them: filters, pairs, and
advantages. No torch.

A reward is a sum, so equal ones differ by its rounding: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence

EQUAL = 1e-12
"""Largest difference, as a share of the largest magnitude, at which numbers count as equal."""


def are_equal(values: Sequence[float]) -> bool:
    """Whether no two of the values (at least one) differ by more than rounding."""
    return max(values) - min(values) <= EQUAL * max(map(abs, values))


def levels(values: Sequence[float]) -> list[int]:
    """The rank of each value among the different ones, 0 for the lowest; equal values share a rank.
    The ranks are all 0 exactly where `are_equal`."""
    slack = EQUAL * max(map(abs, values), default=0.0)
    of_place = [0] * len(values)
    level = 0
    lowest = min(values, default=0.0)
    for place in sorted(range(len(values)), key=values.__getitem__):
        if values[place] - lowest > slack:
            level += 1
            lowest = values[place]
        of_place[place] = level

    return of_place
