"""Histograms of columns: every value is counted once, within the edges of its bar."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo_ui.index.reader import MAX_BARS, bars

FLOATS = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=60)
WHOLE = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=60)


def check(values: np.ndarray, *, is_whole: bool) -> None:
    found = bars(values, values > 0, is_whole=is_whole)
    last = found[-1]
    for bar in found:
        above = values <= bar.high if bar is last else values < bar.high
        own = values[(values >= bar.low) & above]
        assert (bar.size, bar.good) == (len(own), np.count_nonzero(own > 0))

    assert sum(bar.size for bar in found) == len(values)
    assert len(found) <= MAX_BARS


@pytest.mark.slow
@given(FLOATS)
def test_of_any_numbers(values: list[float]) -> None:
    check(np.array(values), is_whole=False)


@given(WHOLE)
def test_of_whole_numbers(values: list[int]) -> None:
    check(np.array(values, dtype=np.int64), is_whole=True)


@pytest.mark.parametrize(
    "values",
    [
        [0.1, 0.2, 0.30000000000000004, 0.3],
        [1.0, float(np.nextafter(1.0, 2))],
        [1e15, 1e15 + 0.125],
        [number / 24 for number in range(25)],
        [-0.0, 0.0, 5e-324],
        [1e300],
    ],
)
def test_of_values_at_the_edges(values: list[float]) -> None:
    check(np.array(values), is_whole=False)


def test_whole_numbers_stand_between_the_edges() -> None:
    found = bars(np.arange(10, 20), np.zeros(10, dtype=bool), is_whole=True)
    assert [(bar.low, bar.high) for bar in found] == [(n - 0.5, n + 0.5) for n in range(10, 20)]
    assert bars(np.zeros(0), np.zeros(0, dtype=bool), is_whole=True) == []
