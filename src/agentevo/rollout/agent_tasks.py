"""Tasks that an agent provides, for example from a dataset with its own environment.

A registered class with `brings_tasks = True` has a method `tasks()`. The method returns a pair, the
tasks to train on and the held-out tasks. Each is a list of `agentevo.Task`, or of mappings like the
rows of a task file. If the method returns no held-out tasks, some of the tasks to train on are held
out, as for a file. Every process of a run calls the method, more than once, so it must return the
same tasks every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.agent import make_player
from agentevo.config import AgentSection
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.errors import ConfigError, describe_error, shown
from agentevo.rollout.given_tasks import GivenTasks, task_of
from agentevo.types import Task


def tasks_of_agent(section: AgentSection) -> GivenTasks:
    """The tasks that the agent of that section provides. Raises ConfigError if its method raises,
    or does not return a pair of lists of tasks."""
    player = make_player(section)
    where = f"agent.type: {section.type}: {type(player).__name__}.tasks()"
    try:
        train, held_out = player.tasks()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: {describe_error(error)}: it must return the tasks to train on and the "
            "held-out ones"
        ) from error

    taken: set[str] = set()
    return GivenTasks(_check_tasks(train, where, taken), _check_tasks(held_out, where, taken), [])


def _check_tasks(rows: Any, where: str, taken: set[str]) -> list[Task]:
    """Raises ConfigError for rows that are not valid tasks. `taken`: the ids that are already
    used."""
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise ConfigError(f"{where} gave {shown(rows)}: give lists of tasks")

    tasks = []
    for number, row in enumerate(rows):
        try:
            item = dict(row) if isinstance(row, Mapping) else row
            task = item if isinstance(item, Task) else task_of(item, TaskFields())
        except RowError as error:
            raise ConfigError(f"{where}: task {number}: {error}") from error

        if task.id in taken:
            raise ConfigError(f"{where}: two tasks have the id {task.id!r}: give each its own")

        taken.add(task.id)
        tasks.append(task)

    return tasks
