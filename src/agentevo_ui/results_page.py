"""The folder of an `agentevo eval`: `/results/{key}`. The page shows the models side by side, the
changes between two of them, and each task's attempts. Only regular files of the folder are read,
and no symbolic links."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from agentevo.errors import ConfigError
from agentevo.runs.evaluation.estimates import Estimate, paired_difference
from agentevo.runs.evaluation.results import RESULTS, SETTINGS, SUMMARY, AttemptLine, ResultsFolder
from agentevo.runs.evaluation.summary import summarise
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import parse_json
from agentevo_ui.context import NotFoundError, dashboard, page

router = APIRouter()

MAX_BYTES = 64 << 20
"""The maximum size of results that are shown task by task, in bytes: about 300,000 attempts."""
MAX_FOLDERS = 4
"""The number of folders whose results are cached in memory."""
PAGE = 50
MAX_CHANGES = 200
MAX_MODELS = 16


class Results(NamedTuple):
    """The content of a folder of results."""

    settings: dict[str, Any]
    models: list[dict[str, Any]]
    """The models' results, in the form of summary.json."""
    players: dict[str, float]
    by_task: dict[str, dict[str, list[AttemptLine]]]
    """Maps a task to a mapping from a model to its attempts."""
    problem: str = ""
    """The reason why `by_task` is missing. Empty if it is there."""
    is_whole: bool = True
    """Whether the evaluation has ended."""


class TaskLine(NamedTuple):
    """A task in the list."""

    id: str
    cells: list[tuple[float | None, int, int]]
    """(share of successes, completed, attempts) of each model."""
    spread: float
    """The largest difference between the models."""


class ModelComparison(NamedTuple):
    """Two models, compared on the tasks that both have completed."""

    difference: Estimate | None
    num_tasks: int
    better: list[tuple[str, float, float]]
    worse: list[tuple[str, float, float]]


@router.get("/results/{key}", response_class=HTMLResponse)
async def results(
    request: Request,
    key: str,
    first: str = Query(default="", alias="from"),
    last: str = Query(default="", alias="to"),
    task: str = "",
    q: str = "",
    at: int = Query(default=0, ge=0, le=1_000_000),
) -> HTMLResponse:
    """The evaluation, as a page."""
    sources = dashboard(request).sources
    folder = (await in_thread(sources.results)).get(key)
    if folder is None:
        raise NotFoundError(f"There is no evaluation {key[:100]} in {sources.shown}.")

    evaluation = await in_thread(_read_cached, folder)
    labels = [str(model.get("model", "")) for model in evaluation.models]
    first = first if first in labels else (labels[0] if labels else "")
    last = last if last in labels else (labels[-1] if labels else "")
    base = f"/results/{quote(key, safe='~+=,@')}"

    return page(
        request,
        "results.html",
        key=key,
        name=key.replace("~", "/"),
        found=evaluation,
        ks=list(evaluation.models[0].get("pass_at", {})) if evaluation.models else [],
        labels=labels,
        first=first,
        last=last,
        changed=await in_thread(_compare, evaluation, first, last) if first != last else None,
        tasks=await in_thread(_tasks, evaluation, labels, q[:200].strip()),
        task=task,
        lines=evaluation.by_task.get(task, {}),
        q=q[:200].strip(),
        at=at,
        size=PAGE,
        base=base,
        here=_link(base, {"from": first, "to": last, "q": q[:200]}, {"task": task, "at": at or ""}),
        link=lambda **changes: _link(base, {"from": first, "to": last, "q": q[:200]}, changes),
    )


def _link(base: str, keys: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    values = {name: value for name, value in {**keys, **changes}.items() if value not in ("", None)}
    return f"{base}?{urlencode(values)}"


def estimate(record: Any) -> Estimate | None:
    """An estimate of summary.json. None if it is missing or malformed."""
    if not isinstance(record, dict):
        return None
    values = [record.get(name) for name in ("value", "low", "high", "tasks")]
    if not all(isinstance(number, (int, float)) for number in values):
        return None
    value, low, high, tasks = (float(number or 0) for number in values)
    return Estimate(value, low, high, int(tasks))


def _read_cached(folder: Path) -> Results:
    """The results of a folder, read again only if its files have changed. Raises ConfigError if the
    folder has none."""
    return _read(folder, tuple(_signature(folder / name) for name in (SETTINGS, RESULTS, SUMMARY)))


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns, stat.S_IFMT(status.st_mode))


@lru_cache(maxsize=MAX_FOLDERS)
def _read(folder: Path, signature: tuple[tuple[int, ...] | None, ...]) -> Results:
    for name in (SETTINGS, RESULTS, SUMMARY):
        if os.path.lexists(folder / name) and not stat.S_ISREG((folder / name).lstat().st_mode):
            raise ConfigError(f"{folder / name} is not a file: the dashboard follows no links")

    results_folder = ResultsFolder(folder)
    settings = results_folder.settings()

    problem = ""
    by_task: dict[str, dict[str, list[AttemptLine]]] = {}
    by_model: dict[str, list[AttemptLine]] = {}
    size = (folder / RESULTS).stat().st_size if (folder / RESULTS).exists() else 0
    if size > MAX_BYTES:
        problem = f"{RESULTS} has {size / 1e6:,.0f} MB: it is too large to be shown task by task"
    else:
        for (model, task, _), line in sorted(
            results_folder.attempts().items(), key=lambda item: item[0][2]
        ):
            by_task.setdefault(task, {}).setdefault(model, []).append(line)
            by_model.setdefault(model, []).append(line)

    summary = _summary(folder)
    is_whole = summary is not None
    if summary is None:
        played_models = settings.get("played_models")
        order = (
            [str(label) for label in played_models]
            if isinstance(played_models, dict)
            else list(by_model)
        )
        attempts = settings.get("attempts")
        attempts_per_task = attempts if isinstance(attempts, int) and 0 < attempts <= 4096 else 1
        played = {label: by_model[label] for label in order if label in by_model}
        summary = summarise(played, attempts_per_task, {}) if played else {}

    models = [
        _shown_model(model_summary)
        for model_summary in _dicts(summary.get("models"))
        if isinstance(model_summary.get("model"), str)
        and isinstance(model_summary.get("pass_at"), dict)
    ]
    return Results(
        settings,
        models[:MAX_MODELS],
        {
            name: float(value)
            for name, value in _dict(summary.get("players")).items()
            if isinstance(value, (int, float))
        },
        by_task,
        problem,
        is_whole,
    )


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _summary(folder: Path) -> dict[str, Any] | None:
    """The content of summary.json. None before the evaluation ends. Raises ConfigError for a
    damaged file."""
    try:
        summary = parse_json((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / SUMMARY} can't be read ({error}): `agentevo eval --resume` writes it again"
        ) from error

    return summary if isinstance(summary, dict) else None


def _shown_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a model, with Estimate objects in place of JSON."""

    def read_estimates(record: Any) -> dict[str, Any]:
        passes = _dict(_dict(record).get("pass_at"))
        return {
            "pass_at": {str(k): estimate(v) for k, v in passes.items()},
            "reward": estimate(_dict(record).get("reward")),
        }

    parts = [
        (name, str(value), read_estimates(account))
        for name, values in {
            **_dict(model.get("by_part")),
            **{key[3:]: model[key] for key in ("by_source", "by_scorer") if model.get(key)},
        }.items()
        if isinstance(values, dict)
        for value, account in values.items()
    ]
    facts = {name: model.get(name) for name in ("model", "failed", "attempts", "tokens")}
    return {**facts, **read_estimates(model), "parts": parts[:200]}


def _share(lines: Sequence[AttemptLine]) -> float | None:
    done = [line.success for line in lines if line.status == "completed"]
    return fmean(done) if done else None


def _tasks(evaluation: Results, labels: Sequence[str], q: str) -> list[TaskLine]:
    """The tasks with `q` in their id. The task with the largest difference between models is
    first."""
    rows = []
    for task, models in evaluation.by_task.items():
        if q and q.lower() not in task.lower():
            continue

        cells = []
        for label in labels:
            lines = models.get(label, [])
            completed = sum(line.status == "completed" for line in lines)
            cells.append((_share(lines), completed, len(lines)))

        shares = [share for share, _, _ in cells if share is not None]
        rows.append(TaskLine(task, cells, max(shares) - min(shares) if shares else 0.0))

    return sorted(rows, key=lambda row: -row.spread)


def _compare(evaluation: Results, first: str, last: str) -> ModelComparison:
    pairs = []
    for task, models in evaluation.by_task.items():
        before = _share(models.get(first, []))
        after = _share(models.get(last, []))
        if before is not None and after is not None:
            pairs.append((task, before, after))

    by_change = sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))
    return ModelComparison(
        paired_difference([pair[1] for pair in pairs], [pair[2] for pair in pairs]),
        len(pairs),
        [pair for pair in by_change if pair[2] > pair[1]],
        [pair for pair in by_change if pair[2] < pair[1]],
    )
