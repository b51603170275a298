"""The agent that a task names: the row's `agent_name`, as in verl's data.

`single_turn_agent` makes one request, without tools. Any other name means the recipe's own agent,
or is verl's name for it. The recipe's agent plays a task without a name.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentevo.agents.policy import Policy
from agentevo.data.task_forms import AGENT_NAME
from agentevo.errors import ConfigError, shown
from agentevo.runtime.registry import nearest
from agentevo.types import Message, Outcome, Task

ONCE = ("single_turn", "single_turn_agent")
"""The names of the agent that makes one request."""
NAMES = {
    "single_turn": ONCE,
    "tool_agent": (*ONCE, "tool_agent", "tool_agent_loop"),
    "code_agent": (*ONCE, "code_agent"),
}
"""`agent.type` -> the names that its tasks can have; tasks of other agent types can have any
name."""


def check_known_name(name: str) -> None:
    """Raises ConfigError for a name that is almost the name of a built-in agent, since no agent
    would play its tasks. Any other name may belong to a user's agent."""
    known_names = sorted({*NAMES, *(name for names in NAMES.values() for name in names)})
    if name in known_names:
        return

    guess = f"{name}_agent" if f"{name}_agent" in known_names else nearest(name, known_names)
    if guess:
        raise ConfigError(
            f"--agent {name}: no agent plays tasks of that name: did you mean {guess!r}? The names "
            f"are {', '.join(known_names)}"
        )


def asks_once(task: Task) -> bool:
    """Whether the task gets one request, without tools."""
    return task.metadata.get(AGENT_NAME) in ONCE


async def ask_once(messages: list[Message], policy: Policy) -> Outcome:
    """Makes one request with the messages; a scorer judges the reply."""
    await policy.generate(messages)
    return Outcome(reward=None)


def check_agent_names(tasks: Iterable[Task], kind: str) -> None:
    """Raises ConfigError for a task that names another agent than this recipe's."""
    known_names = NAMES.get(kind)
    if known_names is None:
        return

    for task in tasks:
        name = task.metadata.get(AGENT_NAME)
        if name is not None and name not in known_names:
            fitting_types = [agent_type for agent_type, names in NAMES.items() if name in names]
            remedy = (
                f"set agent.type={fitting_types[0]}"
                if fitting_types
                else f"use {', '.join(known_names)}"
            )
            raise ConfigError(
                f"tasks: {task.id!r} has the {AGENT_NAME} {shown(name)}, and agent.type={kind} "
                f"plays no such tasks: {remedy}, or leave the column out (tasks.fields)"
            )
