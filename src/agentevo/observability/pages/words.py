"""Formats numbers, times and shares for readers. Figures of one kind have equal width, so that a
column is easy to compare."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"
"""The text in place of a missing number."""
SPARKS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.02
"""A share of the largest value: values that differ by less are drawn as equal."""
HUGE = 1e150
"""The largest number that is drawn to scale."""


def number(value: float | None, digits: int = 3) -> str:
    """`0.412`, `12.3`, `1,234`, `1.2e-05`: about three figures."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("∞" if value > 0 else "−∞")

    size = abs(value)
    if size and (size < 10 ** -(digits + 1) or size >= 1e7):
        return f"{value:.2e}".replace("-", "−", 1 if value < 0 else 0)

    if size >= 100 or value == int(value):
        text = f"{value:,.0f}"
    elif size < 10 ** (1 - digits):  # fixed places would leave at most one figure of it
        text = f"{value:.{max(digits - 1, 1)}g}"
    else:
        text = f"{value:.{max(digits - (size >= 1) - (size >= 10), 1)}f}"

    return text.replace("-", "−")


def percent(value: float | None) -> str:
    """`41%`, `99.4%`, `0.5%`: whole if that loses nothing."""
    if value is None or not math.isfinite(share := 100 * value):
        return NONE
    text = f"{share:.0f}" if abs(share - round(share)) < 0.05 or 10 < share < 90 else f"{share:.1f}"
    return f"{text}%".replace("-", "−")


def chance(logprob: float | None) -> str:
    """The probability of a natural log-prob: `41%`, `0.020%`, `3e-05%`."""
    if logprob is None or not math.isfinite(logprob):
        return NONE
    share = 100 * math.exp(min(logprob, 0.0))
    return f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"


def token_words(numbers: Mapping[str, Any], place: int) -> str:
    """The numbers of one token of a block:
    `id 11 · log-prob -0.2500 (78%) · weights of version 7`."""
    logprobs = numbers["lp"]
    drawn = "drawn greedily"
    if logprobs is not None:
        drawn = f"log-prob {logprobs[place]:.4f} ({chance(logprobs[place])})"
    return f"id {numbers['id'][place]} · {drawn} · weights of version {numbers['ver'][place]}"


def count(value: float | None) -> str:
    """`950`, `12.3k`, `4.56M`, `1.2B`."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(value)
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.3g}{unit}".replace("-", "−")
    return f"{value:,.0f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """`0.42 s`, `8.3 s`, `3 m 07 s`, `2 h 05 m`, `3 d 04 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{max(seconds, 0):.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"

    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} m {round(seconds) % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} m"

    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def ago(then: float | None, now: float | None = None) -> str:
    """How long ago a moment of Unix time was: `just now`, `3 m ago`, `2 d ago`."""
    if then is None:
        return NONE

    seconds = (time.time() if now is None else now) - then
    if seconds < 10:
        return "just now"

    for limit, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= limit:
            return f"{seconds // limit:.0f} {unit} ago"

    return f"{seconds:.0f} s ago"


def moment(then: float | None) -> str:
    """`2026-11-23 18:53`, in this machine's time."""
    if then is None:
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))
    except (ValueError, OverflowError, OSError):  # a time outside the calendar, from a damaged file
        return NONE


def sparkline(values: Sequence[float], most: int | None = None) -> str:
    """Bars from the lowest to the highest of the values, a blank where there is no number; all low
    where these are as good as equal. `most`: the number of bars, each the mean of a stretch."""
    size = 1 if most is None else max(1, math.ceil(len(values) / most))
    means: list[float | None] = []
    for start in range(0, len(values), size):
        stretch = [
            min(max(value, -HUGE), HUGE)
            for value in values[start : start + size]
            if math.isfinite(value)
        ]
        means.append(sum(stretch) / len(stretch) if stretch else None)

    finite = [mean for mean in means if mean is not None]
    if not finite:
        return ""

    low = min(finite)
    span = max(finite) - low
    if span < LEAST_SPAN * max(map(abs, finite)):
        span = 0.0
    return "".join(
        " " if mean is None else SPARKS[round((mean - low) / span * 7) if span else 0]
        for mean in means
    )
