"""A folder of made tasks.

    train.jsonl, eval.jsonl     tasks to train on and held-out ones
    demonstrations.jsonl        conversations that solve tasks of train.jsonl, for `agentevo sft`
    reserve.jsonl               tasks that all or none of the attempts at them have solved
    corpus.jsonl                the passages that tasks were made of, for the tool `search`
    documents.jsonl             the documents that these were read from, with their sha256
    made.json                   the account; written last

The folder appears complete or not at all. An existing folder is refused, never extended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS
from agentevo.data.rows import read_rows
from agentevo.errors import ConfigError
from agentevo.rollout.task_files import DEMONSTRATIONS, HELD_OUT, TRAIN, write_rows
from agentevo.runtime.files import atomic_folder, must_write
from agentevo_evolve.task_making.scenario import CONTENT

RESERVE = "reserve.jsonl"
CORPUS = "corpus.jsonl"
DOCUMENTS = "documents.jsonl"
ACCOUNT = "made.json"


def check_new(folder: Path) -> None:
    """Raises ConfigError for a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already: give another --out, or delete it")


def write_made(
    folder: Path,
    *,
    train: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    reserve: Sequence[dict[str, Any]] = (),
    demonstrations: Sequence[dict[str, Any]] = (),
    corpus: Sequence[dict[str, Any]] = (),
    documents: Sequence[dict[str, Any]] = (),
    account: Mapping[str, Any],
) -> None:
    """Writes the whole folder, or nothing."""
    check_new(folder)
    files = {
        TRAIN: train,
        HELD_OUT: held_out,
        RESERVE: reserve,
        DEMONSTRATIONS: demonstrations,
        CORPUS: corpus,
        DOCUMENTS: documents,
    }
    with must_write(folder, "make room there, or give another --out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as staging:
            for name, rows in files.items():
                if rows:
                    write_rows(rows, staging / name)
            text = json.dumps(account, indent=2, ensure_ascii=False)
            (staging / ACCOUNT).write_text(f"{text}\n", encoding="utf-8")


def made_rows(
    sources: Iterable[str], keys: Iterable[str] = (SOLVED_BY_CALLS, CONTENT)
) -> list[dict[str, Any]]:
    """The rows of generated files that have these keys. Raises ConfigError for any other row."""
    rows = []
    for source in sources:
        for row in read_rows(source):
            if not isinstance(row.value, dict) or {*keys} - row.value.keys():
                raise ConfigError(f"{row.where}: `agentevo data make` did not make this task")
            rows.append(row.value)
    return rows
