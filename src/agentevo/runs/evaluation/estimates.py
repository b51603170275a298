"""Estimates from a model's attempts: pass@k, means, paired differences, each with a 95% interval.

    pass@k = mean over tasks of  1 - C(n - c, k) / C(n, k)

where a task has n completed attempts and c successes. It is the unbiased estimate of the
probability that one of k attempts succeeds (Chen et al. 2021, arXiv 2107.03374, equation 1). A task
with fewer than k completed attempts has no pass@k.

The intervals are percentile bootstraps over tasks, because tasks are independent of each other and
attempts at the same task are not. The random draws have a fixed seed, so the same numbers give the
same interval. For more than MAX_BOOTSTRAP_TASKS tasks, the interval is the normal one, mean +- 1.96
standard errors, which is then nearly the same. If all n tasks have the same value v, resampling
does not vary it. Then the share of all tasks with another value is at most q = 1 - 0.025^(1/n), the
exact bound for 0 of n (Clopper and Pearson 1934; 3.7 / n, the "rule of three" of Hanley and
Lippman-Hand 1983 at 97.5%). Those tasks have values between the bounds a and b of possible values,
so

    low = (1 - q) v + q a        high = (1 - q) v + q b

If v is 0 or 1 and the bounds are 0 and 1, this is the exact binomial interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
MAX_BOOTSTRAP_TASKS = 10_000
_SEED = 20_210_707
RELATIVE_TOLERANCE = 1e-12
"""The relative difference up to which values count as equal."""
_BLOCK_SIZE = 2**20
"""The number of values in a block of resamples, which limits the memory."""


class Estimate(NamedTuple):
    """A mean over tasks, and the ends of its interval."""

    value: float
    low: float
    high: float
    num_tasks: int

    def as_json(self) -> dict[str, float]:
        """The estimate as JSON, for files."""
        return {"value": self.value, "low": self.low, "high": self.high, "tasks": self.num_tasks}


def pass_at_k(num_attempts: int, num_successes: int, k: int) -> float | None:
    """The module's formula for a single task, as a product that never overflows. None if n < k."""
    if k < 1 or not 0 <= num_successes <= num_attempts:
        raise ValueError(f"k={k} of {num_attempts} attempts with {num_successes} successes")
    if num_attempts < k:
        return None

    failures = num_attempts - num_successes
    if failures < k:
        return 1.0

    places = np.arange(failures + 1, num_attempts + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / places))


def ks_of(num_attempts: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    doubled = [2**power for power in range(num_attempts.bit_length()) if 2**power < num_attempts]
    return [*doubled, num_attempts]


def mean_of(values: Sequence[float], bounds: tuple[float, float] = (0.0, 1.0)) -> Estimate | None:
    """The mean of one value for each task. None without values. `bounds`: the range of possible
    values. Ignored if a value is outside of it."""
    if not len(values):
        return None

    column = np.asarray(values, dtype=np.float64)
    value = float(column.mean())
    count = len(column)
    if np.ptp(column) <= RELATIVE_TOLERANCE * abs(value):
        most_extreme = 1.0 - ((1.0 - LEVEL) / 2) ** (1.0 / count)
        ends = min(bounds[0], value), max(bounds[1], value)
        low, high = ((1.0 - most_extreme) * value + most_extreme * end for end in ends)
        return Estimate(value, low, high, count)

    if count > MAX_BOOTSTRAP_TASKS:
        margin = 1.959964 * float(column.std(ddof=1)) / count**0.5
        return Estimate(value, value - margin, value + margin, count)

    low, high = np.quantile(_resample_means(column), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), count)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """The mean of second minus first, on the same tasks in the same order. None without tasks.
    Values are assumed to be between 0 and 1, or between their own extremes."""
    width = max([1.0, *first, *second]) - min([0.0, *first, *second])
    pairs = zip(first, second, strict=True)
    return mean_of([after - before for before, after in pairs], (-width, width))


def _resample_means(column: np.ndarray) -> np.ndarray:
    """The means of RESAMPLES samples with replacement, each as large as the column."""
    generator = np.random.default_rng(_SEED)
    count = len(column)
    rows = max(1, _BLOCK_SIZE // count)
    means = [
        column[generator.integers(0, count, (min(rows, RESAMPLES - done), count))].mean(axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(means)
