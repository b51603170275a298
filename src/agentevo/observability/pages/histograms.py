"""Histograms whose bars are links: each leads to the attempts that it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from agentevo.observability.pages.words import number

WIDTH = 320
HEIGHT = 84
FOOT = 16
_BAR = (
    '<a href="{href}" aria-label="{said}"{now}><title>{said}</title>'
    '<rect class="room" x="{x:.2f}" y="0" width="{w:.2f}" height="{all}"/>'
    '<rect class="rest" x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{rest:.2f}"/>'
    '<rect class="won" x="{x:.2f}" y="{yg:.2f}" width="{w:.2f}" height="{good:.2f}"/>'
    "</a>"
)


class HistogramBar(NamedTuple):
    """Attempts with a value from `low` to `high`, `good` of them successes."""

    low: float
    high: float
    size: int
    good: int
    href: str
    is_chosen: bool = False


def histogram(title: str, bars: Sequence[HistogramBar], *, is_whole: bool = False) -> Markup:
    """An SVG; successes are at the bottom of each bar."""
    most = max((bar.size for bar in bars), default=0)
    if not most:
        return Markup("")

    width = WIDTH / len(bars)
    drawn = []
    for place, bar in enumerate(bars):
        height = max(1.5, bar.size / most * HEIGHT) if bar.size else 0.0
        good = height * bar.good / bar.size if bar.size else 0.0
        label = (
            f"{title} {_span(bar, is_whole)}: {bar.size:,} attempt{'s' * (bar.size != 1)}, "
            f"{bar.good:,} success{'es' * (bar.good != 1)}"
        )
        if bar.size:
            drawn.append(
                _BAR.format(  # a plain text: Markup.format takes a tenth of a page's time
                    href=escape(bar.href),
                    said=escape(label),
                    now=' aria-current="true"' if bar.is_chosen else "",
                    x=place * width + 0.5,
                    w=max(width - 1, 0.5),
                    all=HEIGHT,
                    y=HEIGHT - height,
                    rest=height - good,
                    yg=HEIGHT - good,
                    good=good,
                )
            )

    return Markup(
        '<svg class="histogram" viewBox="0 0 {w} {h}" role="group" aria-label="{title}">{bars}'
        '<text x="0" y="{foot}">{low}</text><text x="{w}" y="{foot}" class="y">{high}</text></svg>'
    ).format(
        w=WIDTH,
        h=HEIGHT + FOOT,
        title=title,
        bars=Markup("".join(drawn)),
        foot=HEIGHT + FOOT - 3,
        low=_edge(bars[0].low, is_whole, 0.5),
        high=_edge(bars[-1].high, is_whole, -0.5) if len(bars) > 1 else "",
    )


def _edge(value: float, is_whole: bool, inwards: float) -> str:
    return f"{value + inwards:,.0f}" if is_whole else number(value)


def _span(bar: HistogramBar, is_whole: bool) -> str:
    low = _edge(bar.low, is_whole, 0.5)
    high = _edge(bar.high, is_whole, -0.5)
    return low if low == high else f"{low} to {high}"
