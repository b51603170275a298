"""Any number of runs side by side: `/compare?run=...&run=...`, or all runs of a sweep,
`?sweep=...`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from agentevo.config import sources as yaml_sources
from agentevo.observability.chart_lines import NAMES, Axis, band_chart, metrics_to_compare
from agentevo.observability.pages.charts import Chart
from agentevo.runs.folder.comparison import PLACE_KEYS, setting_of
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.context import dashboard, page
from agentevo_ui.run_watcher import UnknownRunError
from agentevo_ui.runs_page import row_of

router = APIRouter()

MAX_RUNS = 64
MAX_CHARTS = 60
MAX_KEYS = 400


@dataclass(frozen=True)
class Setting:
    """Runs that form a line: runs that differ only in their seed, or a single run."""

    name: str
    views: tuple[RunView, ...]
    config: dict[str, Any]
    seeds: list[str]
    before: float | None
    after: float | None
    spread: float | None
    """The standard deviation of `after` over the seeds."""
    random: float | None
    optimal: float | None
    steps: int
    wall_s: float | None

    @property
    def gain(self) -> float | None:
        """The gain of the training."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


@router.get("/compare", response_class=HTMLResponse)
async def compare(
    request: Request,
    run: list[str] = Query(default=[]),  # noqa: B008 (FastAPI's way to say it)
    sweep: str = "",
    by: Literal["setting", "run"] = "setting",
    x: Axis = "step",
    q: str = "",
    smooth: float = 0.0,
) -> HTMLResponse:
    """Curves with bands, results, and the differences of the configurations."""
    watcher = dashboard(request).watcher
    keys = list(dict.fromkeys(run))
    if sweep:
        sources = await in_thread(watcher.sources.runs)
        keys += [key for key, source in sources.items() if source.sweep == sweep]

    views = []
    missing = []
    for key in keys[:MAX_RUNS]:
        try:
            views.append(await watcher.view(key))
        except UnknownRunError:
            missing.append(key)

    lines = await in_thread(settings_of, views, by)
    names = sorted({name for view in views for name in view.table.columns})
    chosen_names = metrics_to_compare(names)
    if q:
        words = q.lower().split()
        chosen_names = [name for name in names if all(word in name.lower() for word in words)]

    charts = await in_thread(
        lambda: [chart for name in chosen_names[:MAX_CHARTS] if (chart := chart_of(lines, name, x))]
    )
    differences, num_same = await in_thread(differing, lines)
    return page(
        request,
        "compare.html",
        lines=lines,
        num_runs=len(views),
        missing=missing + [f"only {MAX_RUNS} are compared"] * (len(keys) > MAX_RUNS),
        chosen=list(dict.fromkeys(run)),
        sweep=sweep,
        by=by,
        x=x,
        q=q,
        smooth=min(max(smooth, 0.0), 0.99),
        axes=NAMES,
        names=names[:2000],
        charts=charts,
        differences=differences[:MAX_KEYS],
        num_same=num_same,
    )


def settings_of(views: Sequence[RunView], by: str) -> list[Setting]:
    """The lines, in the order of their first run."""
    groups: dict[object, list[RunView]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for view in views:
        configs[view.key] = config = yaml_sources.leaves(view.config)
        same = (view.name, setting_of(config))
        groups.setdefault(view.key if by == "run" else same, []).append(view)

    names = [group[0].name for group in groups.values()]
    lines = [_setting(group, configs[group[0].key], names) for group in groups.values()]
    seeds = {seed for line in lines for seed in line.seeds}
    if by == "run" and len(seeds) > 1:
        lines = [replace(line, name=f"{line.name}, seed {line.seeds[0]}") for line in lines]
    return lines


def _setting(views: list[RunView], config: dict[str, Any], names: list[str]) -> Setting:
    rows = [row_of(view) for view in views]
    after = [row.after for row in rows if row.after is not None]

    name = views[0].name
    if names.count(name) > 1:  # the folder distinguishes them
        name = views[0].key

    walls = [wall for view in views if (wall := view.summary.get("wall_s"))]
    return Setting(
        name=name,
        views=tuple(views),
        config=config,
        seeds=[str(view.setting("run", "seed")) for view in views],
        before=_mean([row.before for row in rows]),
        after=_mean([row.after for row in rows]),
        spread=statistics.stdev(after) if len(after) > 1 else None,
        random=_mean([row.random for row in rows]),
        optimal=_mean([row.optimal for row in rows]),
        steps=max(view.step for view in views),
        wall_s=statistics.fmean(walls) if walls else None,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean. None if any value is missing, because means over different runs are not
    comparable."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present and len(present) == len(values) else None


def chart_of(settings: Sequence[Setting], metric: str, axis: Axis) -> Chart | None:
    """A line for each setting, as `band_chart` draws it."""
    return band_chart([(setting.name, setting.views) for setting in settings], metric, axis)


def differing(settings: Sequence[Setting]) -> tuple[list[tuple[str, list[str]]], int]:
    """The keys in which configurations differ, with their values, and the number of equal keys."""
    places = set(PLACE_KEYS) - {"run.seed"} if _are_single(settings) else set(PLACE_KEYS)
    keys = sorted({key for setting in settings for key in setting.config} - places)
    differences = []
    num_same = 0
    for key in keys:
        values = [
            str(setting.config[key]) if key in setting.config else "–" for setting in settings
        ]
        if len(set(values)) > 1:
            differences.append((key, values))
        else:
            num_same += 1

    return differences, num_same


def _are_single(settings: Sequence[Setting]) -> bool:
    """Whether each line is a single run, so that its seed is a value like the others."""
    return all(len(setting.views) == 1 for setting in settings)
