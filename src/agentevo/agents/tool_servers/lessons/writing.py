"""Writes a lesson as files: training tasks, held-out tasks, and demonstrations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentevo.agents.tool_servers.lessons import LESSONS
from agentevo.agents.tool_servers.lessons.lesson import demonstrations, lesson_tasks
from agentevo.runtime.files import write_atomic

TRAIN = "train.jsonl"
HELD_OUT = "eval.jsonl"
SHOWN = "demonstrations.jsonl"
CORPUS = "corpus.jsonl"


def write_lesson(
    tool: str, folder: Path, *, count: int, held_out: int, shown: int, seed: int, quits: float = 0.0
) -> dict[str, Any]:
    """Writes the files into the folder, demonstrations last, and returns the tool's options. The
    tasks of the demonstrations are neither in the training file nor held out. Raises AgentEvoError
    before anything is written if the lesson has too few tasks."""
    lesson = LESSONS[tool]
    train = lesson_tasks(lesson, count, seed)
    evaluated = lesson_tasks(lesson, held_out, seed, held_out=True)
    demonstrated = lesson_tasks(lesson, shown, seed + 1) if shown else []

    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if passages := lesson.corpus():
        _write(passages, folder / CORPUS)
        options = {"corpus": str(folder / CORPUS), "top_k": 1}

    _write(train, folder / TRAIN)
    _write(evaluated, folder / HELD_OUT)
    if shown:
        rows = demonstrations(lesson, demonstrated, seed=seed, quits=quits, options=options)
        _write(rows, folder / SHOWN)

    return options


def _write(rows: Iterable[Any], path: Path) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(path, "".join(lines))
