"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

WHOLE = 100
"""Examples of a property that says no number, in `make test-all`."""


def examples(number: int) -> int:
    """`@settings(max_examples=examples(60))`: 60 in `make test-all`, and in `make test` as large a
    share of them as its profile (conftest.py) has of WHOLE."""
    return max(2, number * settings.default.max_examples // WHOLE)
