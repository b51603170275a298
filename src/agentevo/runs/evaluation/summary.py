"""The summary of an evaluation's lines: the results of each model, paired differences from the
first model, and a table of both.

Failed attempts are counted separately and are in no mean. A mean is over tasks, and a task's value
is the mean over its completed attempts. So each task has the same weight, however many of its
attempts failed. A task without a completed attempt is in no mean. A difference is over the tasks
that both models have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from agentevo.errors import ConfigError
from agentevo.rollout.failures import count_kinds, summarize_failures
from agentevo.rollout.task_stages import value_of
from agentevo.runs.evaluation.estimates import (
    Estimate,
    ks_of,
    mean_of,
    paired_difference,
    pass_at_k,
)
from agentevo.runs.evaluation.results import AttemptLine
from agentevo.types import Task

MAX_VALUES = 50
STAGE = "stage"
Parts = Mapping[str, Mapping[str, frozenset[str]]]
"""Maps a key to a mapping from its values to the ids of the tasks with that value."""
Lines = Sequence[AttemptLine]
OfTask = Callable[[Lines], float | None]
"""The value of the completed attempts at a task. None if it is not defined."""


def parts_of_tasks(tasks: Sequence[Task], settings: Mapping[str, Any]) -> Parts:
    """The groups of tasks that an evaluation's settings request (`stages`, `by`). Raises
    ConfigError for a key that no task has, or that has too many values."""
    parts: dict[str, dict[str, frozenset[str]]] = {}
    if stages := settings.get("stages"):
        parts[STAGE] = {name: frozenset(ids) for name, ids in stages.items()}

    for key in settings.get("by", ()):
        values = {task.id: value_of(task, key) for task in tasks}
        distinct = {value for value in map(_hashable, values.values()) if value is not None}
        if not distinct:
            keys = sorted({name for task in tasks for name in task.metadata})
            raise ConfigError(
                f"--by {key}: no task has that key: they have {', '.join(keys[:12]) or 'none'}"
            )

        if len(distinct) > MAX_VALUES:
            raise ConfigError(
                f"--by {key}: it has {len(distinct)} different values, and a table shows at most "
                f"{MAX_VALUES}: give another key, or other tasks"
            )

        parts[key] = {
            "(none)" if value is None else str(value): frozenset(
                name for name, task_value in values.items() if _hashable(task_value) == value
            )
            for value in sorted({*map(_hashable, values.values())}, key=_sort_key)
        }

    return parts


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts, then tasks without a value."""
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def summarise(
    by_model: Mapping[str, Lines],
    attempts: int,
    settings: Mapping[str, Any],
    parts: Parts | None = None,
) -> dict[str, Any]:
    """The contents of summary.json. `by_model`: the lines of each model. The others are compared
    with the first. `parts`: the groups of tasks."""
    labels = list(by_model)
    first = by_model[labels[0]]
    return {
        **settings,
        "models": [
            account(label, by_model[label], attempts) | _by_part(by_model[label], attempts, parts)
            for label in labels
        ],
        "differences": [
            {"model": label, "from": labels[0]} | _differences(first, by_model[label], attempts)
            for label in labels[1:]
        ],
    }


def account(label: str, lines: Lines, attempts: int) -> dict[str, Any]:
    """The results of a model."""
    failed = [line.error for line in lines if line.status != "completed"]
    summary: dict[str, Any] = {
        "model": label,
        "attempts": len(lines),
        "failed": len(failed),
        "failures": count_kinds(failed),
        "failed_words": summarize_failures(failed, len(lines)) if failed else "",
        **_estimates(lines, attempts),
        "tokens": _mean(lines, lambda line: line.tokens),
        "turns": _mean(lines, lambda line: line.turns),
        "seconds": _mean(lines, lambda line: line.seconds),
        "truncated": _mean(lines, lambda line: line.truncated),
        "cost": sum(line.cost for line in lines),
    }
    for key, name in (("by_scorer", "scorer"), ("by_source", "source")):
        values = list(dict.fromkeys(getattr(line, name) for line in lines))
        if len(values) > 1:
            summary[key] = {
                value: _estimates(
                    [line for line in lines if getattr(line, name) == value], attempts
                )
                for value in values
            }

    return summary


def _by_part(lines: Lines, attempts: int, parts: Parts | None) -> dict[str, Any]:
    by_part = {
        name: {
            value: _estimates([line for line in lines if line.task in ids], attempts)
            for value, ids in values.items()
        }
        for name, values in (parts or {}).items()
    }
    return {"by_part": by_part} if by_part else {}


def numbers_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary as numbers for trackers: `val-core/MODEL/pass@1`, `val-core/MODEL/reward`, and so
    on."""
    numbers: dict[str, float] = {}
    for model in summary["models"]:
        estimates = {f"pass@{k}": estimate for k, estimate in model["pass_at"].items()}
        estimates["reward"] = model["reward"]
        measures = {
            name: estimate["value"] for name, estimate in estimates.items() if estimate is not None
        }
        measures |= {
            name: model[name] for name in ("attempts", "failed", "tokens", "turns", "cost")
        }
        numbers |= {
            f"val-core/{model['model']}/{name}": float(value)
            for name, value in measures.items()
            if value is not None
        }

    return numbers


def _estimates(lines: Lines, attempts: int) -> dict[str, Any]:
    tasks = _by_task(lines)
    estimates: dict[str, Any] = {
        "pass_at": {str(k): _json(mean_of(_values(tasks, _passes(k)))) for k in ks_of(attempts)},
        "reward": _json(mean_of(_values(tasks, _reward))),
    }
    parts = list(dict.fromkeys(name for line in lines for name in line.parts))
    if parts:
        estimates["reward_parts"] = {
            name: _json(mean_of(_values(tasks, _part(name)))) for name in parts
        }

    return estimates


def _differences(first: Lines, second: Lines, attempts: int) -> dict[str, Any]:
    before = _by_task(first)
    after = _by_task(second)

    def of(value: OfTask) -> dict[str, float] | None:
        pairs = [(value(before[task]), value(after[task])) for task in before if task in after]
        both = [
            (value_before, value_after)
            for value_before, value_after in pairs
            if value_before is not None and value_after is not None
        ]
        return _json(
            paired_difference(
                [value_before for value_before, _ in both], [value_after for _, value_after in both]
            )
        )

    return {
        "pass_at": {str(k): of(_passes(k)) for k in ks_of(attempts)},
        "reward": of(_reward),
    }


def _by_task(lines: Lines) -> dict[str, list[AttemptLine]]:
    """The completed attempts at each task."""
    tasks: dict[str, list[AttemptLine]] = {}
    for line in lines:
        task_lines = tasks.setdefault(line.task, [])
        if line.status == "completed":
            task_lines.append(line)
    return tasks


def _values(tasks: Mapping[str, Lines], value: OfTask) -> list[float]:
    return [task_value for lines in tasks.values() if (task_value := value(lines)) is not None]


def _passes(k: int) -> OfTask:
    return lambda lines: pass_at_k(len(lines), sum(line.success for line in lines), k)


def _reward(lines: Lines) -> float | None:
    return fmean(line.reward or 0.0 for line in lines) if lines else None


def _part(name: str) -> OfTask:
    def of(lines: Lines) -> float | None:
        part_values = [line.parts[name] for line in lines if name in line.parts]
        return fmean(part_values) if part_values else None

    return of


def _mean(lines: Lines, value: Callable[[AttemptLine], float]) -> float | None:
    line_values = [float(value(line)) for line in lines if line.status == "completed"]
    return fmean(line_values) if line_values else None


def _json(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.as_json()


def table(summary: Mapping[str, Any]) -> str:
    """The summary as a readable table: a row for each model, with its sources and scorers, and the
    differences."""
    models = summary["models"]
    ks = list(models[0]["pass_at"])
    head = ["model", *(f"pass@{k}" for k in ks), "reward", "failed", "tokens"]
    rows = [head]
    for model in models:
        failed = f"{model['failed']}/{model['attempts']}"
        tokens = "" if model["tokens"] is None else f"{model['tokens']:.1f}"
        rows.append([model["model"], *_cells(model, ks), failed, tokens])
        for key in ("by_source", "by_scorer"):
            rows += [
                [f"  {name or '(none)'}", *_cells(estimates, ks), "", ""]
                for name, estimates in model.get(key, {}).items()
            ]

        rows += [
            [f"  {name} {value}", *_cells(estimates, ks), "", ""]
            for name, values in model.get("by_part", {}).items()
            for value, estimates in values.items()
        ]

    rows += [
        [f"{name} player", f"{value:.1%}", *([""] * (len(head) - 2))]
        for name, value in summary.get("players", {}).items()
        if value is not None
    ]
    lines = _align_columns(rows)
    for difference in summary["differences"]:
        lines += ["", f"{difference['model']} minus {difference['from']}, on the same tasks:"]
        named = [*((f"pass@{k}", difference["pass_at"][k], True) for k in ks)]
        named.append(("reward", difference["reward"], False))
        lines += [f"  {name:<8} {_difference(estimate, share)}" for name, estimate, share in named]

    lines += [
        f"{model['model']}: {model['failed_words']}; pass@k and reward leave them out"
        for model in models
        if model["failed"]
    ]
    return "\n".join(lines)


def _cells(estimates: Mapping[str, Any], ks: Sequence[str]) -> list[str]:
    return [*(_share(estimates["pass_at"][k]) for k in ks), _number(estimates["reward"])]


def _share(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate['value']:.1%} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def _number(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _difference(estimate: Mapping[str, float] | None, is_share: bool) -> str:
    if estimate is None:
        return "no task has both"

    value, low, high = (
        100 * estimate[key] if is_share else estimate[key] for key in ("value", "low", "high")
    )
    digits = 1 if is_share else 3
    unit = " points" if is_share else ""

    return (
        f"{value:+.{digits}f}{unit} [{low:+.{digits}f}, {high:+.{digits}f}], "
        f"{estimate['tasks']:.0f} tasks"
    )


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
