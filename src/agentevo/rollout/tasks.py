"""Where an environment's tasks come from: seeds, never shared between training, evaluation and demonstrations."""

from __future__ import annotations

from typing import Literal

from agentevo.seeds import derive_seed
from agentevo.types import Task

Purpose = Literal["train", "eval", "demonstration"]
_REMAINDER: dict[Purpose, int] = {"train": 0, "eval": 1, "demonstration": 2}


def world_seed(run_seed: int, purpose: Purpose, index: int) -> int:
    """Seed number `index` for a purpose. Seeds of different purposes differ modulo 4, so no world is ever in two of them by its seed."""
    return derive_seed(run_seed, purpose, index) // 4 * 4 + _REMAINDER[purpose]


def environment_tasks(environment: str, run_seed: int, purpose: Purpose, first: int, count: int) -> list[Task]:
    """Tasks first .. first + count - 1 of a purpose."""
    return [
        Task(id=f"{purpose}-{index}", environment=environment, seed=world_seed(run_seed, purpose, index))
        for index in range(first, first + count)
    ]


def seed_of_task(run_seed: int, task_id: str) -> int:
    """The world of an environment's task, by the id that `environment_tasks` gave it."""
    purpose, _, index = task_id.rpartition("-")
    if purpose not in _REMAINDER or not index.isdigit():
        raise ValueError(f"{task_id!r} is not the id of an environment's task, such as train-7: given tasks have no world of their own")
    return world_seed(run_seed, purpose, int(index))
