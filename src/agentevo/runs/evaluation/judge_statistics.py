"""Agreement of scores with the truth, and their dependence on other factors. Pure functions.

Ranks are midranks, so equal values have equal ranks. If all scores or all truths are equal, there
is no order, and correlations are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def midranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, [n] float64. Equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles: np.ndarray = (ends - counts + ends - 1) / 2
    return middles[inverse]


def correlation(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Pearson's r. 0 if one of the two does not vary."""
    x = np.asarray(first, float)
    y = np.asarray(second, float)
    x = x - x.mean()
    y = y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 1e-12 else 0.0


def spearman(truths: Sequence[float], scores: Sequence[float]) -> float:
    """Spearman's rho (1904): the correlation of the midranks."""
    return correlation(midranks(truths), midranks(scores))


def pair_accuracy(truths: Sequence[float], scores: Sequence[float]) -> float | None:
    """The share of pairs with different truths that the scores order rightly. Equal scores count
    half. None if there is no such pair."""
    orderings = [
        0.5 * (1 + np.sign(t - u) * np.sign(s - v))
        for (t, s), (u, v) in combinations(zip(truths, scores, strict=True), 2)
        if t != u
    ]
    return float(np.mean(orderings)) if orderings else None


def partial_correlation(
    scores: Sequence[float] | np.ndarray,
    lengths: Sequence[float] | np.ndarray,
    truths: Sequence[float] | np.ndarray,
) -> float:
    """The correlation of scores with lengths at fixed truth, by their ranks within groups, each
    centred and scaled:  (r_sl - r_st r_lt) / sqrt((1 - r_st^2) (1 - r_lt^2)).  0 if the truth
    determines one of them."""
    sl = correlation(scores, lengths)
    st = correlation(scores, truths)
    lt = correlation(lengths, truths)
    size = (1 - st * st) * (1 - lt * lt)
    return float((sl - st * lt) / np.sqrt(size)) if size > 1e-9 else 0.0


def scaled_ranks(values: Sequence[float]) -> np.ndarray:
    """Midranks from -1/2 to 1/2, so that groups of different sizes can be pooled."""
    ranks = midranks(values)
    return (ranks - ranks.mean()) / max(1, len(ranks) - 1)


def place_slope(rotations: Sequence[Sequence[float]]) -> float:
    """How much a score changes between the first and the last position, by least squares.
    `rotations[r][p]`: the score at position p when the attempts were rotated by r, so that the
    attempt at position p is number (p + r) mod n. Every attempt is at every position once, so its
    own value cancels out."""
    scores = np.asarray(rotations, float)
    num = scores.shape[1]

    by_attempt = np.empty_like(scores)
    for turned in range(len(scores)):
        by_attempt[turned] = np.roll(scores[turned], turned)  # column: the number of the attempt

    attempt_means = by_attempt.mean(axis=0)
    places = np.linspace(-0.5, 0.5, num)
    slope = 0.0
    for turned in range(len(scores)):
        slope += float(places @ (scores[turned] - np.roll(attempt_means, -turned)))

    return slope / (len(scores) * float(places @ places))
