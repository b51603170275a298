"""An estimate with its interval as words, and shares as pictures on the scale from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from markupsafe import Markup

from agentevo.observability.pages.words import NONE, number, percent


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
    bar = ("band", interval.low, interval.high)
    return _draw_scale([bar], {"after": interval.value}, random, optimal, width)


def scale(
    before: float | None,
    after: float | None,
    random: float | None,
    optimal: float | None,
    width: int = 160,
) -> Markup:
    """Shares of success on a line from 0 to 1: a tick for random and for optimal play, a bar from
    before to after. Empty if there is nothing to show."""
    if before is None or after is None:
        value = before if after is None else after
        if value is None:
            return Markup("")
        return _draw_scale([], {"after": value}, random, optimal, width)

    points = {"before": before, "after": after}
    return _draw_scale([("gain", before, after)], points, random, optimal, width)


def _draw_scale(
    bars: Sequence[tuple[str, float, float]],
    points: Mapping[str, float],
    random: float | None,
    optimal: float | None,
    width: int,
) -> Markup:
    """`bars`: (class, start, end); `points`: class -> value."""

    def x(value: float) -> float:
        value = value if math.isfinite(value) else 0.0
        return round(4 + min(max(value, 0.0), 1.0) * (width - 8), 1)

    line = Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format
    ticks = {"random": random, "optimal": optimal}
    parts = [line("rail", 4, width - 4, 9, 9)]
    parts += [line(name, x(at), x(at), 3, 15) for name, at in ticks.items() if at is not None]
    parts += [line(name, x(start), x(end), 9, 9) for name, start, end in bars]
    parts += [
        Markup('<circle class="{}" cx="{}" cy="9" r="{}"/>').format(
            name, x(value), 4 if name == "after" else 3
        )
        for name, value in points.items()
    ]
    return Markup(
        '<svg class="scale" width="{w}" height="18" viewBox="0 0 {w} 18" aria-hidden="true">'
        "{p}</svg>"
    ).format(w=width, p=Markup("").join(parts))
