"""Makes an environment's tasks from seeds. Training, evaluation and demonstrations never share a
seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count as count_from
from typing import Literal

from agentevo.runtime.seeds import derive_seed
from agentevo.types import Task

Purpose = Literal["train", "eval", "demonstration"]
_REMAINDER: dict[Purpose, int] = {"train": 0, "eval": 1, "demonstration": 2}


def environment_seed(run_seed: int, purpose: Purpose, index: int | str) -> int:
    """The seed with that index, a number or a name, for a purpose. Seeds of different purposes
    differ modulo 4, so no two purposes share an environment."""
    return derive_seed(run_seed, purpose, index) // 4 * 4 + _REMAINDER[purpose]


def environment_tasks(
    environment: str, run_seed: int, purpose: Purpose, first: int, count: int
) -> list[Task]:
    """The tasks first .. first + count - 1 of a purpose."""
    return [
        Task(
            id=f"{purpose}-{index}",
            environment=environment,
            seed=environment_seed(run_seed, purpose, index),
        )
        for index in range(first, first + count)
    ]


def refill_tasks(environment: str, run_seed: int, step: int) -> Iterator[Task]:
    """Endless further tasks for one training step. Their ids and seeds differ from those of
    `environment_tasks` and of other steps."""
    for place in count_from():
        index = f"{step}+{place}"
        yield Task(
            id=f"train-{index}",
            environment=environment,
            seed=environment_seed(run_seed, "train", index),
        )


def seed_of_task(run_seed: int, task_id: str) -> int:
    """The seed of an environment's task, from the id that `environment_tasks` or `refill_tasks`
    gave it. A task that a later round repeats (ID~ROUND) has the same seed."""
    purpose, _, index = task_id.partition("~")[0].rpartition("-")
    if purpose not in _REMAINDER or not re.fullmatch(r"\d+(\+\d+)?", index):
        raise ValueError(
            f"{task_id!r} is not the id of an environment's task, such as train-7: given tasks "
            "have no environment of their own"
        )
    return environment_seed(run_seed, purpose, int(index) if index.isdigit() else index)
