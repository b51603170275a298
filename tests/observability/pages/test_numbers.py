"""Numbers and histograms on pages, in words that a person reads."""

from __future__ import annotations

import pytest

from agentevo.observability.pages.histograms import HistogramBar, histogram
from agentevo.observability.pages.words import number


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [(3e-4, 3, "0.0003"), (-1.2345e-4, 3, "−0.00012"), (0.0034, 3, "0.0034"), (9e-5, 3, "9.00e-05"),
     (0.412, 3, "0.412"), (12.34, 3, "12.3"), (1234, 3, "1,234"), (0, 3, "0"),
     (0.04, 1, "0.04"), (0.46, 1, "0.5"), (5.46, 1, "5.5")],
)  # fmt: skip
def test_small_numbers_keep_their_figures(value: float, digits: int, said: str) -> None:
    assert number(value, digits) == said


def test_a_bar_of_one_attempt_is_said_so() -> None:
    drawn = histogram("Reward", [HistogramBar(0, 1, 1, 1, "?a"), HistogramBar(1, 2, 2, 0, "?b")])
    assert ": 1 attempt, 1 success<" in drawn and ": 2 attempts, 0 successes<" in drawn
