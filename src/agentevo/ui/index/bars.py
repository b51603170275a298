"""Histograms of columns: of a million values in some milliseconds, since their edges are evenly
apart and none of them has to be searched for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BARS = 24
MOST_WHOLE = 2**20
"""A range of whole numbers each of which is counted by itself."""
NEAR = 1e-6
"""Of a quotient to a whole number."""
CLOSE = 1e-6
"""A width of a bar beside the values' own size below which a quotient does not say its number."""


class IndexBar(NamedTuple):
    low: float
    high: float
    size: int
    good: int
    """Successes among them."""


def bars(values: np.ndarray, good: np.ndarray, *, is_whole: bool) -> list[IndexBar]:
    """Of values [N], with the successes [N] among them; none of no values."""
    if not len(values):
        return []

    low = float(values.min())
    high = float(values.max())
    edges = edges_of(low, high, is_whole=is_whole)
    num = len(edges) - 1
    if is_whole and high - low < MOST_WHOLE:
        # Each whole number is counted, and then those of a bar are added up.
        own = (values if values.dtype.kind == "i" else values.astype(np.int64)) - int(low)
        places = bar_of(np.arange(low, high + 1), edges)
        all_of, good_of = (np.bincount(one, minlength=len(places)) for one in (own, own[good]))
        counts, successes = (np.bincount(places, one, minlength=num) for one in (all_of, good_of))
    else:
        both = np.bincount(2 * bar_of(values, edges) + good, minlength=2 * num)
        counts = both[::2] + both[1::2]
        successes = both[1::2]

    return [
        IndexBar(float(edges[i]), float(edges[i + 1]), int(counts[i]), int(successes[i]))
        for i in range(num)
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

    quotients = (values - edges[0]) / width
    found = quotients.astype(np.int32)
    np.minimum(found, num - 1, out=found)
    # Only a quotient that is nearly whole may be rounded to the wrong side of an edge.
    near = np.flatnonzero(np.abs(quotients - np.rint(quotients)) < NEAR)
    own = values[near]
    places = found[near]
    places -= own < edges[places]
    places += (own >= edges[places + 1]) & (places < num - 1)
    found[near] = places
    return found
