"""Several runs in one picture: a panel for each metric, a line for each setting, and around the
mean of several seeds the band from the lowest to the highest.

Points that only some of a setting's runs have are left out: a mean over fewer runs is not
comparable.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from agentevo.errors import ConfigError, MissingExtraError
from agentevo.observability.pages.charts import Chart
from agentevo.observability.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    as_rate,
    finish,
    fonts,
    leave_room,
)
from agentevo.runtime.files import write_atomic

LOOKS = [
    (color, dashes)
    for dashes, color in product(
        ("-", "--", ":", "-."), (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)
    )
]
"""Colours and markers of the lines, in their order: more can't be distinguished."""
MOST_PANELS = 12
COLUMNS = 2
TITLE_WIDTH = 40
"""Characters of a line above a panel."""
FEW = 3
"""A line of fewer values has a dot at each."""


def check_picture(path: Path) -> None:
    """Raises ConfigError if `write_comparison` could not write."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: the name must end in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--plot {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}"
        )


def write_comparison(charts: Sequence[Chart], path: Path) -> None:
    """Draws charts whose lines are the same settings; the file appears whole or not at all. Raises
    ConfigError for more lines or panels than a picture can show."""
    if not charts or len(charts) > MOST_PANELS:
        raise ConfigError(f"plot: {len(charts)} metrics: a picture has 1 to {MOST_PANELS}")

    if len(charts[0].lines) > len(LOOKS):
        raise ConfigError(
            f"plot: {len(charts[0].lines)} settings: a picture tells {len(LOOKS)} apart: give "
            "fewer runs"
        )

    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install matplotlib") from error

    names = [line.name for line in charts[0].lines]
    installed = {font.name for font in fontManager.ttflist}
    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    with matplotlib.rc_context({**STYLE, "font.family": fonts(installed, names)}):
        figure = Figure(figsize=(8, 3.2 * rows + 0.22 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)

        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, chart in zip(grid, charts, strict=False):
            for (color, dashes), line in zip(LOOKS, chart.lines, strict=False):
                # Between its own values: others may have some at other places.
                finite_places = [n for n, value in enumerate(line.values) if math.isfinite(value)]
                x, values = ([of[n] for n in finite_places] for of in (chart.x, line.values))
                dot = "o" if len(finite_places) < FEW else None
                axes.plot(
                    x,
                    values,
                    color=color,
                    linestyle=dashes,
                    marker=dot,
                    markersize=3,
                    label=_plain(line.name),
                )
                if line.low is not None and line.high is not None:
                    low, high = ([of[n] for n in finite_places] for of in (line.low, line.high))
                    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)

            if chart.share:
                as_rate(axes)
            else:
                leave_room(axes)

            finish(axes, _in_lines(chart.title), "", steps=False)
            axes.set_xlabel(chart.name_of_x)

        for axes in grid[len(charts) :]:
            axes.remove()

        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=1)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": "agentevo"})

    try:
        write_atomic(path, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written: {error.strerror or error}") from error


def _in_lines(title: str) -> str:
    return textwrap.fill(_plain(title), TITLE_WIDTH, break_on_hyphens=False)


def _plain(text: str) -> str:
    """A name, escaped so that matplotlib does not read it as a TeX formula or hide its label."""
    return text.replace("$", r"\$").lstrip("_")[:100] or "?"
