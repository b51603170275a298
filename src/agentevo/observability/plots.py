"""Charts as PNG files, for READMEs and papers: those of a run's report, and those of several runs.

Drawn with matplotlib's Agg canvas on free-standing figures: no display and no pyplot state. A chart
whose metrics were never logged is left out. Values that are not finite are left out of their line.
Colours are Okabe and Ito's, which colour-blind readers can distinguish; line styles and labels show
the same differences.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.errors import ConfigError, MissingExtraError
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.runtime.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22262B"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8A8F98")
LOOKS = [(color, dashes) for dashes, color in product(("-", "--", ":", "-."), COLORS)]
"""Colours and dashes of the lines, in their order: more can't be distinguished."""
MOST_PANELS = 12
COLUMNS = 2
TITLE_WIDTH = 40
"""Characters of a line above a panel."""
FEW = 3
"""A line of fewer values has a dot at each."""
LEAST_SPAN = 0.1
"""The least height of a panel, as a share of the largest value."""
FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")
"""Fonts in the order of preference; matplotlib includes the last one."""
CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "IPAGothic",
)
"""Fonts with Chinese, Japanese and Korean, for characters that those above lack."""
_CJK = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B8BDC4",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E8EB",
    "grid.linewidth": 0.8,
    "xtick.color": "#5B616A",
    "ytick.color": "#5B616A",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}


def write_plots(
    metrics_rows: Sequence[MetricsRow], summary: Mapping[str, Any], folder: Path | str
) -> list[Path]:
    """Draws the charts of the run's report and returns the files written: learning_curve,
    supervised, optimisation, lengths, throughput (.png)."""
    from agentevo.observability.report_charts import columns_of, report_charts
    from agentevo.observability.report_page import result

    charts = report_charts(columns_of(metrics_rows), metrics_rows, summary)
    pictures = {
        "learning_curve": charts.learning,
        "supervised": charts.supervised,
        "optimisation": charts.optimisation,
        "lengths": charts.lengths,
        "throughput": charts.speed,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    headline = result(metrics_rows, summary)
    named = [str(summary[key]) for key in ("environment", "model") if summary.get(key)]
    parts = [part.rstrip("/").rpartition("/")[2] or part for part in named]
    if headline.before is not None and headline.after is not None:
        comparable = "" if headline.is_comparable else " (not comparable)"
        parts.append(f"held-out success {headline.before:.0%} → {headline.after:.0%}{comparable}")

    written = []
    for name, shown in pictures.items():
        if shown:
            title = ", ".join(parts) if name == "learning_curve" else ""
            path = folder / f"{name}.png"
            write_atomic(path, _png(shown, title))
            written.append(path)

    return written


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

    picture = _png(charts)
    try:
        write_atomic(path, picture)
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written: {error.strerror or error}") from error


def _png(charts: Sequence[Chart], title: str = "") -> bytes:
    """A picture with a panel for each chart. If all panels have the same lines, one legend serves
    them all."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise MissingExtraError(
            "plots need matplotlib: pip install matplotlib, or set tracking.report=false"
        ) from error

    names = {tuple(line.name for line in chart.lines) for chart in charts}
    installed = {font.name for font in fontManager.ttflist}
    texts = [title, *(name for lines in names for name in lines), *(c.title for c in charts)]
    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    legend_lines = len(charts[0].lines) if len(names) == 1 else 0
    with matplotlib.rc_context({**STYLE, "font.family": fonts(installed, texts)}):
        figure = Figure(figsize=(8, 3.2 * rows + 0.22 * legend_lines), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, charts, columns)
        if title:
            figure.suptitle(textwrap.fill(_plain(title), 90), x=0.01, ha="left", fontweight="bold")

        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": "agentevo"})

    return picture.getvalue()


def draw(figure: Figure, charts: Sequence[Chart], columns: int) -> None:
    """Draws a panel for each chart, and their legends."""
    has_one_legend = len({tuple(line.name for line in chart.lines) for chart in charts}) == 1
    grid = figure.subplots(math.ceil(len(charts) / columns), columns, squeeze=False).flatten()
    for axes, chart in zip(grid, charts, strict=False):
        for place, line in enumerate(chart.lines):
            _draw_line(axes, chart.x, line, LOOKS[place if line.color is None else line.color])

        _finish(axes, chart)
        if len(chart.lines) > 1 and not has_one_legend:
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0)

    for axes in grid[len(charts) :]:
        axes.remove()

    if has_one_legend:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=1)


def _draw_line(axes: Axes, x: Sequence[float], line: ChartLine, look: tuple[str, str]) -> None:
    """A line between its own values, because others may have some at other places."""
    color, dashes = look
    places = [n for n, value in enumerate(line.values) if math.isfinite(value)]
    xs, values = ([of[n] for n in places] for of in (x, line.values))
    axes.plot(
        xs,
        values,
        color=color,
        linestyle=dashes,
        marker="o" if len(places) < FEW else None,
        markersize=3,
        label=_plain(line.name),
    )
    if line.low is not None and line.high is not None:
        low, high = ([of[n] for n in places] for of in (line.low, line.high))
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def _finish(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title(textwrap.fill(_plain(chart.title), TITLE_WIDTH, break_on_hyphens=False))
    axes.set_xlabel(chart.name_of_x)
    if chart.share:
        axes.set_ylim(-0.06, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        leave_room(axes)

    x_min, x_max = axes.get_xlim()
    if x_max - x_min < 1:  # one step only
        axes.set_xlim(x_min - 1, x_max + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))


def leave_room(axes: Axes) -> None:
    """Makes the axis at least `LEAST_SPAN` of the largest value high, so that negligible changes do
    not fill it."""
    low, high = axes.get_ylim()
    least_span = LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least_span:
        middle = (low + high) / 2
        axes.set_ylim(middle - least_span / 2, middle + least_span / 2)


def fonts(installed: Collection[str], texts: Iterable[str]) -> list[str]:
    """The fonts to draw with, of those that are installed. Warns if the texts have Chinese,
    Japanese or Korean and no installed font has it."""
    cjk = [name for name in CJK_FONTS if name in installed]
    if not cjk and any(_CJK.search(text) for text in texts):
        warnings.warn(
            "no installed font has Chinese, Japanese or Korean: pictures show boxes instead; "
            "install one, such as the package fonts-noto-cjk (Debian) or "
            "google-noto-sans-cjk-fonts (Fedora), and make them again with `agentevo report`",
            stacklevel=3,
        )

    return [*(name for name in FONTS if name in installed), *cjk]


def _plain(text: str) -> str:
    """A name, escaped so that matplotlib does not read it as a TeX formula or hide its label."""
    return text.replace("$", r"\$").lstrip("_")[:300] or "?"
