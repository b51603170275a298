"""Pictures that need no script: sparklines, the scale from random to optimal play, and small line
charts in the places where a browser draws larger ones with uPlot. All sizes are SVG's own; colours
are classes of the style sheet."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

from markupsafe import Markup

from agentevo.pages.text import one_line
from agentevo.pages.words import number as written

SPARK_POINTS = 60
CHART_POINTS = 300
HUGE = 1e150
"""The largest number that is drawn to scale."""
TINY = 1e-150
"""The smallest number that is drawn to scale."""
LEAST_SPAN = 0.02
"""A share of the largest value: values that differ by less are drawn as equal."""


def as_json(value: object) -> Markup:
    """For a `<script type="application/json">` or an attribute in single quotes: no text in it can
    end these."""
    text = json.dumps(for_json(value), separators=(",", ":"), allow_nan=False)
    for symbol, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("'", "\\u0027")):
        text = text.replace(symbol, code)
    return Markup(text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def for_json(value: object) -> object:
    """NaN and infinity are null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return value


def thin_means(values: Sequence[float], most: int) -> list[float]:
    """Reduces values to a number of points: the mean of each stretch."""
    if len(values) <= most:
        return list(values)

    edges = [round(number * len(values) / most) for number in range(most + 1)]
    means = []
    for start, end in itertools.pairwise(edges):
        finite = [value for value in values[start:end] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)

    return means


def sparkline(values: Sequence[float], width: int = 120, height: int = 24) -> Markup:
    """A line without axes, from the lowest to the highest value; in the middle where these are
    nearly equal. Empty for fewer than two numbers."""
    points = thin_means([_drawable(value) for value in values], SPARK_POINTS)
    finite = [value for value in points if math.isfinite(value)]
    if len(finite) < 2:
        return Markup('<svg class="spark" width="{}" height="{}" aria-hidden="true"></svg>').format(
            width, height
        )

    low, high = _range(finite)
    lines = _lines(
        [
            (
                2 + number * (width - 6) / (len(points) - 1),
                height - 3 - (value - low) / (high - low) * (height - 6),
            )
            if math.isfinite(value)
            else None
            for number, value in enumerate(points)
        ]
    )
    end = next(
        (number, value)
        for number, value in reversed(list(enumerate(points)))
        if math.isfinite(value)
    )
    x = 2 + end[0] * (width - 6) / (len(points) - 1)
    y = height - 3 - (end[1] - low) / (high - low) * (height - 6)

    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" aria-hidden="true">'
        '<path d="{d}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2"/></svg>'
    ).format(w=width, h=height, d=lines, x=x, y=y)


def _drawable(value: float) -> float:
    return min(max(value, -HUGE), HUGE) if math.isfinite(value) else math.nan


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest, which differ by LEAST_SPAN at least; -1 to 1 of zeros."""
    low = min(values)
    high = max(values)
    largest = max(abs(low), abs(high))
    least = max(LEAST_SPAN * largest, TINY) if largest else 1.0
    if high - low < least:
        middle = low / 2 + high / 2
        return middle - least, middle + least

    return low, high


def _lines(points: Sequence[tuple[float, float] | None]) -> str:
    """The path of a line with gaps."""
    parts = []
    pen_is_down = False
    for point in points:
        if point is None:
            pen_is_down = False
            continue
        parts.append(f"{'L' if pen_is_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen_is_down = True

    return "".join(parts)


def scale(
    before: float | None,
    after: float | None,
    random: float | None,
    optimal: float | None,
    width: int = 160,
) -> Markup:
    """Shares of success on a line from 0 to 1: a tick for random and for optimal play, a bar from
    before to after. Empty if there is nothing to show."""
    if after is None and before is None:
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

    last = after if after is not None else before
    if before is not None and after is not None:
        parts.append(
            Markup('<line class="gain" x1="{}" x2="{}" y1="9" y2="9"/>').format(x(before), x(after))
        )
        parts.append(Markup('<circle class="before" cx="{}" cy="9" r="3"/>').format(x(before)))

    if last is not None:
        parts.append(Markup('<circle class="after" cx="{}" cy="9" r="4"/>').format(x(last)))

    return Markup(
        '<svg class="scale" width="{w}" height="18" viewBox="0 0 {w} 18" aria-hidden="true">'
        "{p}</svg>"
    ).format(w=width, p=Markup("").join(parts))


def line_chart(
    x: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float]]],
    colors: Sequence[int] | None = None,
    width: int = 560,
    height: int = 180,
) -> Markup:
    """A chart for readers without a script: (name, values) of each line over `x`. `colors`: the
    number of each line's; None: by its place."""
    lines = [(name, [_drawable(value) for value in values]) for name, values in lines]
    finite = [value for _, values in lines for value in values if math.isfinite(value)]
    if not finite or not x:
        return Markup("")

    low, high = _range(finite)
    x_min = x[0]
    span = (x[-1] - x[0]) or 1.0
    paths = []
    for number, (_, values) in enumerate(lines):
        every = max(1, math.ceil(len(values) / CHART_POINTS))
        points = [
            (
                48 + (place - x_min) / span * (width - 56),
                8 + (high - value) / (high - low) * (height - 28),
            )
            if math.isfinite(value)
            else None
            for place, value in list(zip(x, values, strict=True))[::every]
        ]
        paths.append(
            Markup('<path class="line c{}" d="{}"/>').format(
                (number if colors is None else colors[number]) % 8, _lines(points)
            )
        )

    labels = Markup(
        '<text x="44" y="14" class="y">{top}</text><text x="44" y="{by}" class="y">{bottom}</text>'
        '<text x="48" y="{bx}">{first}</text><text x="{right}" y="{bx}" class="y">{last}</text>'
    ).format(
        top=written(high),
        bottom=written(low),
        by=height - 18,
        bx=height - 4,
        first=written(x[0]),
        last=written(x[-1]),
        right=width - 8,
    )
    name = one_line(", ".join(name for name, _ in lines), 300)
    return Markup(
        '<svg class="plot" viewBox="0 0 {w} {h}" role="img" aria-label="{name}">'
        "{labels}{paths}</svg>"
    ).format(w=width, h=height, name=name, labels=labels, paths=Markup("").join(paths))


def timeline(
    segments: Sequence[tuple[float, float, int, str]], width: int = 1200, height: int = 44
) -> Markup:
    """(start, length, number of the colour, label) of stretches of time on one line."""
    end = max((start + length for start, length, _, _ in segments), default=0.0)
    if not end or not math.isfinite(end):
        return Markup("")

    parts = [
        Markup('<rect class="f{c}" x="{x:.2f}" y="4" width="{w:.2f}" height="{h}">').format(
            c=color % 8,
            x=start / end * width,
            w=max(length / end * width, 0.6),
            h=height - 8,
        )
        + Markup("<title>{}</title></rect>").format(one_line(text, 300))
        for start, length, color, text in segments
    ]
    return Markup(
        '<svg class="timeline" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-label="Where the time of the last steps went">{p}</svg>'
    ).format(w=width, h=height, p=Markup("").join(parts))
