"""Measures the difficulty of tasks for an agent by real attempts.

A task gives no training signal if all or none of its attempts solve it. Such a task moves to the
reserve, and a later grading tries it again. A failed attempt does not count. A task whose attempts
have all failed moves to the reserve too, without a rate.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.data.rows import read_json_lines
from agentevo.errors import ConfigError
from agentevo.rollout.task_files import DEMONSTRATIONS, HELD_OUT, TRAIN, write_rows
from agentevo.runs.evaluation.evaluate import EvaluationRun, check_attempts, evaluate
from agentevo.runs.evaluation.results import ResultsFolder
from agentevo.runtime.parsing import read_json_object
from agentevo_evolve.task_making.files import ACCOUNT, CORPUS, RESERVE, made_rows, write_made
from agentevo_evolve.task_making.scenario import CONTENT

RATE = "success_rate"
"""The key in a graded task's metadata with its rate."""


def grade_tasks(
    rows: Sequence[Mapping[str, Any]], solved: Mapping[str, Sequence[bool]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tasks that some attempts solve and some do not, and the tasks for the reserve. `solved`:
    maps a task's id to the result of each attempt that did not fail."""
    edge: list[dict[str, Any]] = []
    reserve: list[dict[str, Any]] = []
    for row in rows:
        outcomes = solved.get(row["id"], ())
        plain = {key: value for key, value in row.items() if key != RATE}
        rate = sum(outcomes) / len(outcomes) if outcomes else None
        graded = plain if rate is None else {**plain, RATE: rate}
        (reserve if rate in (None, 0.0, 1.0) else edge).append(graded)

    return edge, reserve


def graded_folder(
    folder: Path,
    target: str,
    out: Path,
    overrides: Sequence[str],
    *,
    attempts: int,
    note: Callable[[str], None],
) -> list[str]:
    """Runs the attempts, writes the folder `out`, and returns a report. Raises ConfigError for a
    folder without generated tasks, and AttemptsFailedError if every attempt failed."""
    sources = [str(folder / name) for name in (TRAIN, RESERVE) if (folder / name).is_file()]
    if not sources or not (folder / ACCOUNT).is_file():
        raise ConfigError(f"{folder}: holds no tasks of `agentevo data make`")

    rows = made_rows(sources, [CONTENT])
    held_file = folder / HELD_OUT
    held_out_rows = made_rows([str(held_file)], [CONTENT]) if held_file.is_file() else []
    contents = {row[CONTENT] for row in held_out_rows}
    leaked = next((row["id"] for row in rows if row[CONTENT] in contents), None)
    if leaked is not None:
        raise ConfigError(
            f"{folder}: {leaked} is both trained on and held out: make the tasks again"
        )

    solved = _measure_solved(rows, target, overrides, attempts, note)
    edge, reserve = grade_tasks(rows, solved)
    if not edge:
        note("every task is solved by all or by none of its attempts, so there is no train.jsonl")

    account = read_json_object(folder / ACCOUNT) | {
        "graded_by": target,
        "attempts": attempts,
        "train": len(edge),
        "reserve": len(reserve),
    }
    write_made(
        out,
        train=edge,
        held_out=held_out_rows,
        reserve=reserve,
        demonstrations=_lines(folder / DEMONSTRATIONS),
        corpus=_lines(folder / CORPUS),
        account=account,
    )
    always = sum(row.get(RATE) == 1.0 for row in reserve)
    never = sum(row.get(RATE) == 0.0 for row in reserve)

    return [
        f"edge         {len(edge)} of {len(rows)} tasks are solved by some attempts and not by all",
        f"reserve      {always} solved always, {never} never, "
        f"{len(reserve) - always - never} without an attempt that did not fail",
    ]


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file. Empty if it does not exist."""
    if not file.is_file():
        return []
    return [row.value for row in read_json_lines(file)]


def _measure_solved(
    rows: Sequence[dict[str, Any]],
    target: str,
    overrides: Sequence[str],
    attempts: int,
    note: Callable[[str], None],
) -> dict[str, list[bool]]:
    """Maps a task's id to the result of each attempt that did not fail."""
    with tempfile.TemporaryDirectory(prefix="agentevo-grade-") as scratch:
        played = Path(scratch) / "tasks.jsonl"
        results = Path(scratch) / "results"
        write_rows(rows, played)
        evaluation = EvaluationRun(
            target=target, overrides=overrides, tasks=[str(played)], attempts=attempts, out=results
        )
        summary = evaluate(evaluation, note)
        check_attempts(summary)

        solved: dict[str, list[bool]] = defaultdict(list)
        for line in ResultsFolder(results).attempts().values():
            if line.status == "completed":
                solved[line.task].append(line.success)

    return solved
