"""Groups of tasks: by the recipe's stages, and by keys of the tasks' metadata such as a
difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.errors import ConfigError
from agentevo.rollout.task_stages import value_of
from agentevo.types import Task

MAX_VALUES = 50
STAGE = "stage"
Parts = Mapping[str, Mapping[str, frozenset[str]]]
"""Maps a key to a mapping from its values to the ids of the tasks with that value."""


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
