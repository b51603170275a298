"""Histograms of columns: of a million values in some milliseconds, since their edges are evenly
apart and none of them has to be searched for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BARS = 24
CLOSE = 1e-6
"""A width of a bar beside the values' own size below which a quotient does not say its number."""


class Bar(NamedTuple):
    low: float
    high: float
    size: int
    good: int
    """Successes among them."""


def bars(values: np.ndarray, good: np.ndarray, *, is_whole: bool) -> list[Bar]:
    """Of values [N], with the successes [N] among them; none of no values."""
    if not len(values):
        return []
    edges = edges_of(float(values.min()), float(values.max()), is_whole=is_whole)
    places = bar_of(values, edges)
    counts = np.bincount(places, minlength=len(edges) - 1)
    successes = np.bincount(places[good], minlength=len(edges) - 1)
    return [
        Bar(float(edges[i]), float(edges[i + 1]), int(counts[i]), int(successes[i]))
        for i in range(len(counts))
    ]


def edges_of(low: float, high: float, *, is_whole: bool) -> np.ndarray:
    """Of whole numbers at whole places: no bar holds more of them than its neighbours."""
    if is_whole:
        width = max(1, -(-int(high - low + 1) // BARS))
        return (
            np.arange(low, high + 1 + width, width) - 0.5
            if high > low
            else np.array([low - 0.5, low + 0.5])
        )
    if high <= low:
        return np.array([low - 0.5, high + 0.5])
    return np.linspace(low, high, BARS + 1)


def bar_of(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[N]: the bar of each value, as np.histogram counts them: one at an edge belongs to the bar
    that begins there, or to the last. The edges are evenly apart."""
    num = len(edges) - 1
    width = float(edges[-1] - edges[0]) / num
    if width <= CLOSE * max(abs(float(edges[0])), abs(float(edges[-1]))):
        return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, num - 1)
    found = np.clip(((values - edges[0]) / width).astype(np.int64), 0, num - 1)
    found -= values < edges[found]  # the quotient is rounded
    found += (values >= edges[found + 1]) & (found < num - 1)
    return found
