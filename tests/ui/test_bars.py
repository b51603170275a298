"""Histograms of columns count as numpy's do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.ui.index.bars import bar_of, bars, edges_of

FLOATS = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=60)
WHOLE = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=60)


def check(values: np.ndarray, *, is_whole: bool) -> None:
    edges = edges_of(float(values.min()), float(values.max()), is_whole=is_whole)
    counts = np.bincount(bar_of(values, edges), minlength=len(edges) - 1)
    assert counts.tolist() == np.histogram(values, edges)[0].tolist()


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
    ],
)
def test_of_values_at_the_edges(values: list[float]) -> None:
    check(np.array(values), is_whole=False)


def test_successes_are_counted_within_their_bars() -> None:
    values = np.array([0.0, 0.0, 1.0])
    good = np.array([True, False, True])
    found = bars(values, good, is_whole=False)
    assert [(one.size, one.good) for one in found if one.size] == [(2, 1), (1, 1)]
    assert bars(values[:0], good[:0], is_whole=True) == []
