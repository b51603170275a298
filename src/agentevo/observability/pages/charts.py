"""The content of a chart, as plain data for uPlot in a browser, and in words for readers without a
script or without sight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.observability.pages import words
from agentevo.observability.pages.text import one_line


@dataclass(frozen=True)
class ChartLine:
    """Values over the chart's x, NaN where there is none; `low` and `high`: the band around it."""

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: int | None = None
    """One of the eight colours of lines; None: by its place."""


@dataclass(frozen=True)
class Chart:
    """Lines over a common x, which rises."""

    title: str
    x: Sequence[float]
    lines: Sequence[ChartLine]
    share: bool = False
    """Whether values are shares, from 0 to 1."""
    name_of_x: str = "step"

    @property
    def told(self) -> dict[str, Any]:
        """The data for charts.js, which documents the fields."""
        lines = []
        for line in self.lines:
            fields: dict[str, Any] = {"name": one_line(line.name, 160), "values": list(line.values)}
            if line.low is not None and line.high is not None:
                fields |= {"low": list(line.low), "high": list(line.high)}
            if line.color is not None:
                fields["color"] = line.color
            lines.append(fields)

        return {
            "x": list(self.x),
            "lines": lines,
            "share": self.share,
            "name_of_x": self.name_of_x,
            "description": self.description,
        }

    @property
    def description(self) -> str:
        """The first, last, lowest and highest value of each line."""
        return "; ".join(self._describe(line) for line in self.lines)

    def _describe(self, line: ChartLine) -> str:
        name = one_line(line.name, 160)
        points = [
            (x, value) for x, value in zip(self.x, line.values, strict=True) if math.isfinite(value)
        ]
        if not points:
            return f"{name}: no value"

        values = [value for _, value in points]
        first, last = (
            f"{self._write(value)} at {self.name_of_x} {words.number(x)}"
            for x, value in (points[0], points[-1])
        )
        if len(points) == 1:
            return f"{name}: {first}"
        ends = f"lowest {self._write(min(values))}, highest {self._write(max(values))}"
        return f"{name}: {first}, {last}, {ends}"

    def _write(self, value: float | None) -> str:
        return words.percent(value) if self.share else words.number(value)

    @property
    def last(self) -> str:
        """The newest value, if there is one line."""
        if len(self.lines) != 1:
            return ""
        values = self.lines[0].values
        newest = next((value for value in reversed(values) if math.isfinite(value)), None)
        return self._write(newest)
