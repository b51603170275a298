"""Real calls of the server that tasks are made for. A session is of the same kind as an
attempt's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from agentevo.agents.tools.state_checks import StateCheck
from agentevo.agents.tools.toolbox import UNANSWERED, AttemptTools, Toolbox
from agentevo.config.tools import ToolSection
from agentevo.types import Task

REFUSAL_FACTS = ("num_wrong_arguments",)
_ERROR_PREFIX = re.compile(r"\s*(?:[a-z]+ )?error\b\s*:", re.IGNORECASE)
"""The start of a result with which some servers report an error."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """A call and its result."""

    tool: str
    arguments: dict[str, Any]
    text: str
    is_error: bool = False
    is_refused: bool = False
    """Whether the tool refused the arguments."""
    is_lost: bool = False
    """Whether the server sent no result."""


class ToolWorld:
    """Opens sessions at the server."""

    def __init__(self, sections: Sequence[ToolSection]) -> None:
        """Raises ConfigError if the tools can't be created."""
        self._toolbox = Toolbox(sections)

    def open(self, world: int, seed: int = 0) -> AbstractAsyncContextManager[AttemptTools]:
        """Opens a session like that of an attempt at a task in that world, with the seed of this
        session."""
        task = Task(id=f"making-{world}", metadata={"world": world})
        return self._toolbox.open(task, seed=seed)

    async def close(self) -> None:
        """Closes everything that the sessions share."""
        await self._toolbox.close()


async def call_all(
    tools: AttemptTools, calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[CallResult]:
    """Makes real calls of these tools with these arguments, one after the other."""
    return [await call_tool(tools, tool, arguments) for tool, arguments in calls]


async def call_tool(tools: AttemptTools, tool: str, arguments: Mapping[str, Any]) -> CallResult:
    """Makes a real call."""
    call = StateCheck(tool=tool, arguments=dict(arguments), result="").call()
    before = dict(tools.metrics)
    (result,) = await tools.call([call])
    rose = {name for name, count in tools.metrics.items() if count > before.get(name, 0)}

    return CallResult(
        tool=tool,
        arguments=dict(arguments),
        text=result.text,
        is_error=result.is_error or bool(_ERROR_PREFIX.match(result.text)),
        is_refused=bool(rose.intersection(REFUSAL_FACTS)),
        is_lost=bool(rose.intersection(UNANSWERED)),
    )
