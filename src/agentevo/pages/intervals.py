"""An estimate with its interval, as words and as a picture on the scale from 0 to 1."""

from __future__ import annotations

import math
from typing import Protocol

from markupsafe import Markup

from agentevo.pages.words import NONE, number, percent


class Interval(Protocol):
    """A value and the ends of its interval; `evaluation.estimates.Estimate` is one."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def share_interval(interval: Interval | None) -> str:
    """`41% [33, 50]`."""
    if interval is None:
        return NONE
    low, high = (percent(end).removesuffix("%") for end in (interval.low, interval.high))
    return f"{percent(interval.value)} [{low}, {high}]"


def number_interval(interval: Interval | None) -> str:
    """`0.412 [0.33, 0.5]`."""
    if interval is None:
        return NONE
    return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def points(interval: Interval | None) -> str:
    """A difference of shares: `+12 points [5, 19]`."""
    if interval is None:
        return NONE
    value, low, high = (
        number(100 * each, 1) for each in (interval.value, interval.low, interval.high)
    )
    return f"{'+' if interval.value > 0 else ''}{value} points [{low}, {high}]"


def interval_scale(
    interval: Interval | None,
    random: float | None = None,
    optimal: float | None = None,
    width: int = 160,
) -> Markup:
    """A share on a line from 0 to 1: a bar for the interval, a point for the value, ticks for
    random and optimal play."""
    if interval is None:
        return Markup("")

    def x(value: float) -> float:
        value = value if math.isfinite(value) else 0.0
        return round(4 + min(max(value, 0.0), 1.0) * (width - 8), 1)

    parts = [Markup('<line class="rail" x1="4" x2="{}" y1="9" y2="9"/>').format(width - 4)]
    for name, value in (("random", random), ("optimal", optimal)):
        if value is not None:
            parts.append(
                Markup('<line class="{n}" x1="{x}" x2="{x}" y1="3" y2="15"/>').format(
                    n=name, x=x(value)
                )
            )

    parts.append(
        Markup('<line class="band" x1="{}" x2="{}" y1="9" y2="9"/>').format(
            x(interval.low), x(interval.high)
        )
    )
    parts.append(Markup('<circle class="after" cx="{}" cy="9" r="4"/>').format(x(interval.value)))
    return Markup(
        '<svg class="scale" width="{w}" height="18" viewBox="0 0 {w} 18" aria-hidden="true">'
        "{p}</svg>"
    ).format(w=width, p=Markup("").join(parts))
