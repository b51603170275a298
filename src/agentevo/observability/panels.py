"""How every panel of a picture looks: colours, fonts, and the parts that panels share.

Colours are Okabe and Ito's, which colour-blind readers can distinguish; line styles and labels show
the same differences.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from agentevo.observability.curves import Series, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#8A8F98"
INK = "#22262B"


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


LEAST_SPAN = 0.1
"""The least height of a panel, as a share of the largest value."""


def noisy_line(axes: Axes, line: Series, color: str, label: str) -> None:
    """The values as a faint line, their running mean as a strong one."""
    steps, values = line
    axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
    axes.plot(steps, smooth(values), color=color, label=label)


def leave_room(axes: Axes, least: float = 0.0) -> None:
    """Makes the axis high enough that negligible changes do not fill it: at least `LEAST_SPAN` of
    the largest value, and at least `least` in the panel's own unit."""
    low, high = axes.get_ylim()
    least_span = max(LEAST_SPAN * max(abs(low), abs(high)), least)
    if high - low < least_span:
        middle = (low + high) / 2
        axes.set_ylim(middle - least_span / 2, middle + least_span / 2)


def finish(axes: Axes, title: str, unit: str, *, steps: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    axes.set_ylabel(unit)
    x_min, x_max = axes.get_xlim()
    if x_max - x_min < 1:  # one step only
        axes.set_xlim(x_min - 1, x_max + 1)

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if steps:
        axes.set_xlabel("step")


def as_rate(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.06, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def legend_below(axes: Axes) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0, handlelength=1.4
    )
