"""The results of a pipeline: a table of its stages, the same as JSON, and report.html.

With a single seed, an interval is that of the mean over the held-out tasks
(runs/evaluation/estimates.py). With n seeds, it is that of the mean over seeds by Student's t: mean
+- t(0.975, n - 1) * std / sqrt(n).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import yaml

from agentevo.observability.pages.static_page import render_still
from agentevo.runtime.console import format_duration
from agentevo.runtime.credentials import without_passwords
from agentevo.runtime.files import must_write, write_atomic
from agentevo_evolve.pipeline.next_stages import PipelineProgress
from agentevo_evolve.pipeline.plan import HELD_OUT, START
from agentevo_evolve.pipeline.reading import Pipeline
from agentevo_evolve.pipeline.state import PipelineState, StageState

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5% with 1 to 10 degrees of freedom. With more, it approaches the normal
1.96."""
REMEDY = "make room there, or make it writable, and resume"


class ResultFigure(NamedTuple):
    """A mean with its interval; `pages.intervals` draws it."""

    value: float
    low: float
    high: float


def over_seeds(values: Sequence[float]) -> ResultFigure | None:
    """The mean and interval by the module's formula. With a single value, the interval is unknown:
    minus to plus infinity."""
    if not values:
        return None

    mean = fmean(values)
    if len(values) == 1:
        return ResultFigure(mean, -math.inf, math.inf)

    place = len(values) - 2
    t = T_975[place] if place < len(T_975) else 1.96 + 2.6 / (place + 1)
    margin = t * stdev(values) / math.sqrt(len(values))
    return ResultFigure(mean, mean - margin, mean + margin)


def figure(states: Sequence[StageState], name: str) -> ResultFigure | None:
    """A number of a stage, over its seeds."""
    values = [state.numbers[name] for state in states if name in state.numbers]
    ends = (f"{name}_low", f"{name}_high")
    if len(values) == 1 == len(states) and all(end in states[0].numbers for end in ends):
        return ResultFigure(values[0], *(states[0].numbers[end] for end in ends))

    estimate = over_seeds(values)
    bounds = _BOUNDS.get(name)
    if (
        estimate is None
        or bounds is None
        or not all("success" in state.numbers for state in states)
    ):
        return estimate

    return ResultFigure(estimate.value, max(estimate.low, bounds[0]), min(estimate.high, bounds[1]))


_BOUNDS = {"success": (0.0, 1.0), "gain": (-1.0, 1.0), "gain_from_start": (-1.0, 1.0)}
"""The possible values of each number. With few seeds, the formula may exceed them."""


def success(numbers: Mapping[str, float]) -> str:
    """`41.0%`."""
    return f"{100 * numbers['success']:.1f}%" if "success" in numbers else "no share"


def points(numbers: Mapping[str, float]) -> str:
    """`+3.1 points [-1.0, 7.2]`."""
    value, low, high = (100 * numbers[f"gain{end}"] for end in ("", "_low", "_high"))
    return f"{value:+.1f} points [{low:.1f}, {high:.1f}]"


def write_results(pipeline: Pipeline, standings: Sequence[PipelineProgress]) -> dict[str, Any]:
    """Writes table.md, table.json and report.html to the pipeline's folder. Returns the contents of
    table.json, and the table. Raises DiskError."""
    rows = stage_rows([standing.state for standing in standings])
    table = markdown(rows, standings)
    results = {
        "name": pipeline.config.name,
        "seeds": [standing.seed for standing in standings],
        "status": [standing.state.status for standing in standings],
        "wall_s": sum(standing.state.wall_s for standing in standings),
        "tokens": sum(standing.state.tokens for standing in standings),
        "cost": sum(standing.state.cost for standing in standings),
        "stages": [row.as_json() for row in rows],
    }
    with must_write(pipeline.dir, REMEDY):
        write_atomic(pipeline.dir / "table.md", table)
        write_atomic(pipeline.dir / "table.json", json.dumps(results, indent=1))
        write_atomic(pipeline.dir / "report.html", report_html(pipeline, standings, rows))

    return {**results, "table": table}


class StageRow(NamedTuple):
    """A stage over all seeds."""

    id: str
    kind: str
    status: str
    """The statuses of all seeds, if they differ."""
    success: ResultFigure | None
    gain: ResultFigure | None
    total: ResultFigure | None
    """The gain over the model that the pipeline began with."""
    wall_s: float
    """The mean time of a seed, in seconds."""
    tokens: float
    num_seeds: int
    """The number of seeds with a measurement."""
    why: str

    def as_json(self) -> dict[str, Any]:
        """The row as JSON, for files."""
        figures = {"success": self.success, "gain": self.gain, "gain_from_start": self.total}
        return {
            "stage": self.id,
            "kind": self.kind,
            "status": self.status,
            **{
                name: None
                if cell is None
                else {
                    key: value if math.isfinite(value) else None
                    for key, value in cell._asdict().items()
                }
                for name, cell in figures.items()
            },
            "wall_s": self.wall_s,
            "tokens": self.tokens,
            "seeds_measured": self.num_seeds,
            "why": self.why,
        }


def stage_rows(states: Sequence[PipelineState]) -> list[StageRow]:
    """A row for each stage and round, after a row for the first model. `states`: the state of each
    seed."""
    first = f"{START}@{HELD_OUT}"
    rows = []
    for name in states[0].stages:
        if "@" in name and name != first:
            continue

        stage_states = [state.stages[name] for state in states if name in state.stages]
        measurement = name if name == first else f"{name}@{HELD_OUT}"
        all_measured = [state.stages.get(measurement) for state in states]
        measured = [state for state in all_measured if state and state.status == "finished"]
        reasons = dict.fromkeys(state.why for state in stage_states if state.why)
        rows.append(
            StageRow(
                START if name == first else name,
                "" if name == first else stage_states[0].kind,
                ", ".join(dict.fromkeys(state.status for state in stage_states)),
                figure(measured, "success"),
                figure(measured, "gain"),
                figure(measured, "gain_from_start"),
                fmean(state.wall_s for state in stage_states),
                fmean(float(state.tokens) for state in stage_states),
                len(measured),
                "; ".join(reasons)[:300],
            )
        )

    return rows


def markdown(rows: Sequence[StageRow], standings: Sequence[PipelineProgress]) -> str:
    """The table, with a line that explains its numbers."""
    header = ["stage", "kind", "held-out success", "gain, points", "gain from start", "time"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        state = f" ({row.status})" if row.status != "finished" else row.why and f" ({row.why})"
        lines.append(
            [
                f"{row.id}{state}",
                row.kind,
                _percent(row.success),
                _points(row.gain),
                _points(row.total),
                format_duration(row.wall_s) if row.wall_s else "",
            ]
        )

    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n{legend(standings)}\n"


def legend(standings: Sequence[PipelineProgress]) -> str:
    """A sentence that explains the numbers."""
    seeds = ", ".join(str(standing.seed) for standing in standings)
    if len(standings) == 1:
        return (
            f"One seed ({seeds}). Intervals are those of a mean over the held-out tasks, and "
            "don't include the variation between seeds. The gain is over the model that the "
            "stage began with."
        )

    return (
        f"Means over {len(standings)} seeds ({seeds}) with 95% intervals by Student's t. The gain "
        "is over the model that the stage began with; time is that of one seed."
    )


def _percent(percentage: ResultFigure | None) -> str:
    if percentage is None:
        return ""
    return f"{100 * percentage.value:.1f}%" + _ends(
        percentage, 100 * percentage.low, 100 * percentage.high
    )


def _points(difference: ResultFigure | None) -> str:
    if difference is None:
        return ""
    return f"{100 * difference.value:+.1f}" + _ends(
        difference, 100 * difference.low, 100 * difference.high
    )


def _ends(estimate: ResultFigure, low: float, high: float) -> str:
    return f" [{low:.1f}, {high:.1f}]" if math.isfinite(estimate.low) else ""


def report_html(
    pipeline: Pipeline, standings: Sequence[PipelineProgress], rows: Sequence[StageRow]
) -> str:
    """The whole page."""
    config = pipeline.config
    states = [standing.state for standing in standings]
    measured = [row for row in rows if row.success is not None]
    facts = [
        ("state", ", ".join(dict.fromkeys(state.status for state in states)), ""),
        ("seeds", ", ".join(str(standing.seed) for standing in standings), ""),
        ("stages", f"{len(pipeline.config.stages)}", ""),
        ("time", format_duration(sum(state.wall_s for state in states)), ""),
        ("tokens", f"{sum(state.tokens for state in states):,}", ""),
    ]
    tree = config.model_dump(mode="json", exclude_unset=True)

    return render_still(
        "pipeline_report.html",
        name=config.name,
        about=config.description,
        made_at=time.time(),
        facts=facts,
        first=measured[0].success if measured else None,
        last=measured[-1].success if len(measured) > 1 else None,
        total=measured[-1].total if len(measured) > 1 else None,
        rows=rows,
        urls={},
        measured={},
        legend=legend(standings),
        lineage=[lineage(standing) for standing in standings],
        config=without_passwords(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)),
    )


def lineage(standing: PipelineProgress) -> tuple[str, list[list[str]]]:
    """For each seed: the inputs and outputs of each stage, by their digests."""
    rows = []
    for name, state in standing.state.stages.items():
        if "@" in name or not state.digest:
            continue

        used = ", ".join(
            f"{used_input.stage}.{used_input.key} {used_input.sha256[:10]}"
            for used_input in state.inputs
        )
        outputs = ", ".join(
            f"{key} {output.sha256[:10]}"
            for key, output in state.outputs.items()
            if key != "folder"
        )
        seed = "" if state.seed is None else str(state.seed)
        rows.append([name, seed, used, outputs, str(state.starts), state.digest[:10]])

    return f"seed {standing.seed}", rows
