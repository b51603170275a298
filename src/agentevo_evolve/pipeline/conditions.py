"""Conditions of stages: `${stages.rl.success} > 0.5`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

_FORM = re.compile(r"\s*(?P<left>\$\{[^{}]+\})\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<right>\S+)\s*")
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class StageCondition(NamedTuple):
    """`reference` is the reference as it is written."""

    reference: str
    sign: str
    right: float

    def holds(self, left_value: float) -> bool:
        """Whether the condition holds for the value of the reference."""
        return SIGNS[self.sign](left_value, self.right)


def condition(text: str) -> StageCondition:
    """Raises ValueError for an invalid condition."""
    match = _FORM.fullmatch(text)
    try:
        right = float(match["right"]) if match else math.nan
    except ValueError:
        right = math.nan

    if match is None or not math.isfinite(right):
        raise ValueError(
            f"when: {text[:80]!r} is not a valid condition: write one such as "
            "${stages.rl.success} > 0.5"
        )

    return StageCondition(match["left"], match["sign"], right)
