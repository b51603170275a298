"""Histograms of columns, computed with numpy, with bars of equal width."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_BARS = 24


class IndexBar(NamedTuple):
    low: float
    high: float
    size: int
    good: int
    """The number of successes in the bar."""


def bars(values: np.ndarray, good: np.ndarray, *, is_whole: bool) -> list[IndexBar]:
    """The bars of values [N], with the number of successes [N] in each. Empty without values. A
    value at an edge belongs to the bar that begins there. At the last edge, it belongs to the last
    bar."""
    if not len(values):
        return []

    low, high, num = _evenly(float(values.min()), float(values.max()), is_whole=is_whole)
    sizes, edges = np.histogram(values, num, (low, high))
    successes, _ = np.histogram(values[good], num, (low, high))
    return [
        IndexBar(float(edges[i]), float(edges[i + 1]), int(sizes[i]), int(successes[i]))
        for i in range(num)
    ]


def _evenly(low: float, high: float, *, is_whole: bool) -> tuple[float, float, int]:
    """The first and the last edge, and the number of bars. Edges are halfway between whole numbers,
    so that all bars cover the same number of them."""
    if is_whole:
        width = max(1, -(-int(high - low + 1) // MAX_BARS))
        num = -(-int(high - low + 1) // width)
        return low - 0.5, low - 0.5 + num * width, num

    if high <= low:
        half = max(0.5, abs(low) * 1e-6)
        return low - half, high + half, 1

    # Between adjacent floats, there is no room for edges.
    is_wide = (np.diff(np.linspace(low, high, MAX_BARS + 1)) > 0).all()
    return low, high, MAX_BARS if is_wide else 1
