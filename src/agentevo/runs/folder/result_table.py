"""The table of runs' results: a row for all runs that differ only in their seed, or a row for each
run.

The results come from the folders of finished runs. A sweep's folder means all finished runs in it.
The text is Markdown. `write_table` writes it to a page between two marker lines, and leaves the
rest of the page unchanged.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentevo.config import sources
from agentevo.errors import ConfigError
from agentevo.observability.metrics import MAX_FAILED_SHARE
from agentevo.runs.folder.comparison import setting_of
from agentevo.runs.folder.run_folder import (
    SWEEP_FILE,
    check_run_folder,
    finished_summary,
    is_sweep_folder,
)
from agentevo.runtime.files import write_atomic
from agentevo.runtime.parsing import read_text

BEGIN = "<!-- table -->"
END = "<!-- /table -->"
LEGEND = (
    "Success is greedy, on held-out tasks. With several seeds: the mean ± the standard "
    "deviation over them; time is that of one run."
)


NOT_COMPARABLE = (
    f"(!) More than {MAX_FAILED_SHARE:.0%} of the attempts of an evaluation failed: before and "
    "after can't be compared."
)

FIGURES = ("before", "after", "gain", "sampled", "random", "optimal", "wall_s")
"""The numbers of a `RunResult` of which a row has the mean."""
SHOWN_KEYS = 3
"""The maximum number of keys that distinguish rows with the same name. Runs that differ in more
keys are distinguished by their folders."""


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run. Success is from 0 to 1."""

    name: str
    folder: Path
    seed: int
    environment: str | None
    before: float | None
    """None if every attempt of an evaluation failed."""
    after: float | None
    sampled: float | None
    random: float | None
    optimal: float | None
    tasks: int
    steps: int
    wall_s: float
    failed: float
    """The larger share of failed attempts of the two evaluations before and after."""
    setting: frozenset[tuple[str, str]]
    """The keys of the configuration, with their values, that runs of the same row must share."""

    @property
    def gain(self) -> float | None:
        """The change of success, None if one of the two is unknown."""
        return None if self.before is None or self.after is None else self.after - self.before


class TableFigure(NamedTuple):
    """The mean and, for two values or more, the standard deviation (n - 1)."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class ResultRow:
    """The results of one setting, by seed."""

    results: tuple[RunResult, ...]

    @property
    def mark(self) -> str:
        """The mark after figures that can't be compared."""
        return " (!)" if any(result.failed > MAX_FAILED_SHARE for result in self.results) else ""

    @property
    def first(self) -> RunResult:
        return self.results[0]

    @property
    def seeds(self) -> str:
        return ", ".join(str(result.seed) for result in self.results)

    def figure(self, name: str) -> TableFigure | None:
        """The number with that name over the runs. None if a run has no such number."""
        values = [getattr(result, name) for result in self.results]
        if None in values:
            return None
        return TableFigure(
            statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
        )


def read_results(folders: Iterable[Path]) -> list[RunResult]:
    """The results in the order of the folders, each run once. Within a sweep, they are ordered by
    variant and seed. Raises `ConfigError` for a folder without a finished run."""
    results: dict[Path, RunResult] = {}
    for folder in folders:
        for result in _read_sweep(folder) if is_sweep_folder(folder) else [_read_run(folder)]:
            results.setdefault(result.folder.resolve(), result)

    return list(results.values())


def make_rows(results: Sequence[RunResult], *, each: bool = False) -> list[ResultRow]:
    """A row for every setting, in the order of its first run. With `each`, a row for every run."""
    if each:
        return [ResultRow((result,)) for result in results]
    groups: dict[tuple[str, frozenset[tuple[str, str]]], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.name, result.setting), []).append(result)
    return [
        ResultRow(tuple(sorted(group, key=lambda result: result.seed))) for group in groups.values()
    ]


def markdown(rows: Sequence[ResultRow]) -> str:
    """The table and its legend. If all rows have the same environment, that column is left out.
    Rows with the same name are distinguished by the keys in which they differ, or by their
    folders."""
    labels = dict(zip([row.first.folder for row in rows], _labels(rows), strict=True))
    environments = len({row.first.environment for row in rows}) > 1
    columns: list[tuple[str, Callable[[ResultRow], str]]] = [
        ("run", lambda row: labels[row.first.folder]),
        *([("environment", lambda row: row.first.environment or "")] if environments else []),
        ("seeds", lambda row: row.seeds),
        ("before RL", lambda row: _percent(row.figure("before"), spread=False)),
        ("after", lambda row: _percent(row.figure("after"))),
        ("gain, points", lambda row: _points(row.figure("gain")) + row.mark),
        ("sampled, after", lambda row: _percent(row.figure("sampled"), spread=False)),
        ("random player", lambda row: _percent(row.figure("random"), spread=False)),
        ("optimal player", lambda row: _percent(row.figure("optimal"), spread=False)),
        ("held-out tasks", lambda row: _same(result.tasks for result in row.results)),
        ("steps", lambda row: _same(result.steps for result in row.results)),
        ("time per run", lambda row: _duration(row.figure("wall_s"))),
    ]
    lines = [
        [title for title, _ in columns],
        ["---" for _ in columns],
        *([cell(row) for _, cell in columns] for row in rows),
    ]
    legend = [LEGEND] + [NOT_COMPARABLE] * any(row.mark for row in rows)
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *legend, ""])


def _labels(rows: Sequence[ResultRow]) -> list[str]:
    """The name of each row. No two rows have both the same name and the same seeds."""
    names = [row.first.name for row in rows]
    labels = []
    for row in rows:
        same = [dict(peer.first.setting) for peer in rows if peer.first.name == row.first.name]
        keys = sorted(
            key
            for key in set().union(*same)
            if len({setting.get(key, "none") for setting in same}) > 1
        )
        setting = dict(row.first.setting)
        texts = [f"{key}={setting.get(key, 'none').strip(chr(39))}" for key in keys]
        if len(keys) > SHOWN_KEYS:
            texts = [str(row.first.folder)]
        labels.append(f"{row.first.name} ({', '.join(texts)})" if texts else row.first.name)

    called = [(label, row.seeds) for label, row in zip(labels, rows, strict=True)]
    return [
        label if called.count((label, row.seeds)) == 1 else f"{name} ({row.first.folder})"
        for name, label, row in zip(names, labels, rows, strict=True)
    ]


def as_json(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """The rows as plain values. Each row has the mean and standard deviation of each figure, and
    the values of each seed."""
    entries = []
    for row in rows:
        figures = {name: row.figure(name) for name in FIGURES}
        means = {name: figure and figure._asdict() for name, figure in figures.items()}
        runs = [
            {"seed": r.seed, "folder": str(r.folder), "tasks": r.tasks, "steps": r.steps}
            | {name: getattr(r, name) for name in FIGURES}
            for r in row.results
        ]
        entries.append(
            {"run": row.first.name, "environment": row.first.environment, **means, "runs": runs}
        )

    return entries


def check_page(path: Path) -> None:
    """Raises `ConfigError` if `write_table` could not write there."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}: give a "
            "Markdown file"
        )
    if path.exists():
        _parts(path)


def write_table(path: Path, table: str) -> None:
    """Writes the table between the marker lines of a page, atomically, and creates the page if
    needed. Raises `ConfigError`."""
    check_page(path)
    head, tail = _parts(path) if path.exists() else ("", "\n")
    try:
        write_atomic(path, f"{head}{BEGIN}\n{table}{END}{tail}")
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be written ({error.strerror}): give another Markdown file"
        ) from error


def write_sweep_table(folder: Path) -> str | None:
    """Writes table.md and table.json of all finished runs in a sweep's folder. Returns the text, or
    None, without a file, if no run has finished."""
    results = _finished_in(folder)
    if not results:
        return None

    rows = make_rows(results)
    table = markdown(rows)
    write_atomic(folder / "table.md", table)
    write_atomic(folder / "table.json", json.dumps(as_json(rows), indent=2))
    return table


def _parts(path: Path) -> tuple[str, str]:
    """The text of a page before and after the table."""
    text = read_text(path)
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ConfigError(
            f"{path}: needs one line {BEGIN} and after it one line {END}, with the table's place "
            "between them"
        )

    return head, tail


def _read_sweep(folder: Path) -> list[RunResult]:
    results = _finished_in(folder)
    if not results:
        raise ConfigError(
            f"{folder}: no run of this sweep has finished yet: continue it with `agentevo train "
            f"RECIPE --resume`"
        )
    return results


def _finished_in(folder: Path) -> list[RunResult]:
    """The results of a sweep's finished runs: by variant in the sweep's order, then by seed."""
    variants = sources.read_yaml(folder / SWEEP_FILE).get("variants", {})
    if not isinstance(variants, dict):
        raise ConfigError(
            f"{folder / SWEEP_FILE}: is damaged: variants is not a mapping: restore it"
        )

    order = list(variants)
    results = [
        _result(path, summary)
        for path in sorted(folder.iterdir())
        if (summary := finished_summary(path)) is not None
    ]
    return sorted(
        results,
        key=lambda result: (
            order.index(result.name) if result.name in order else len(order),
            result.name,
            result.seed,
        ),
    )


def _read_run(folder: Path) -> RunResult:
    summary = finished_summary(check_run_folder(folder))
    if summary is None:
        raise ConfigError(
            f"{folder}: this run has not finished: continue it with `agentevo train RECIPE "
            f"--resume`"
        )
    return _result(folder, summary)


def _result(folder: Path, summary: dict[str, Any]) -> RunResult:
    evaluation = summary["eval"]
    config = sources.leaves(sources.read_yaml(folder / "config.yaml"))
    return RunResult(
        name=summary["name"],
        folder=folder,
        seed=summary["seed"],
        environment=summary.get("environment"),
        before=evaluation["before"],
        after=evaluation["after"],
        sampled=evaluation.get("sampled", {}).get("after"),
        random=evaluation.get("random"),
        optimal=evaluation.get("optimal"),
        tasks=evaluation.get("n") or 0,
        steps=summary["steps"],
        wall_s=summary["wall_s"],
        failed=max((evaluation.get("failed") or {"": 0.0}).values()),
        setting=setting_of(config),
    )


def _percent(figure: TableFigure | None, *, spread: bool = True) -> str:
    if figure is None:
        return ""
    return f"{100 * figure.mean:.1f}%" + (
        f" ± {100 * figure.std:.1f}" if spread and figure.std is not None else ""
    )


def _points(figure: TableFigure | None) -> str:
    return "" if figure is None else f"{100 * figure.mean:+.1f}"


def _same(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values))


def _duration(figure: TableFigure | None) -> str:
    seconds = 0.0 if figure is None else figure.mean
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
