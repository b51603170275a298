"""A task's checks of the final state of its attempts, as calls that any client can make.

    metadata: {"state_checks": [{"tool": "find_bookings", "arguments": {"guest": "Ann"},
                                 "result": "room 12 in Rome, double, 2 nights"}, ...]}

After an attempt, the calls are made in its session. The attempt scores 1 if each call returns
exactly the task's result, else 0. So any server whose calls show its state gives a checkable
outcome, even if the server itself scores nothing. An error result is compared by its text like any
other. A call without an answer (a server that is gone, no answer in time) does not show the state,
and fails the attempt.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from agentevo.agents.tools.tool import ToolResult
from agentevo.errors import EnvironmentFailure
from agentevo.types import ToolCall

STATE_CHECKS = "state_checks"
"""Key of a task's metadata, and name of the part of the reward."""
SOLVED_BY_CALLS = "solved_by_calls"
"""Key of a made task's metadata: the calls that solve it."""
MAX_CHECKS = 64


class StateCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call, and its result in the correct state."""

    tool: str
    """The tool's name as the policy sees it."""
    arguments: dict[str, Any] = {}
    result: str

    def call(self) -> ToolCall:
        """The call as a policy would make it."""
        return ToolCall(self.tool, json.dumps(self.arguments, ensure_ascii=False))


def state_checks(metadata: Mapping[str, Any]) -> list[StateCheck]:
    """The state checks of a task. Raises ValueError for malformed ones."""
    raw_checks = metadata.get(STATE_CHECKS)
    if raw_checks is None:
        return []

    try:
        checks = msgspec.convert(raw_checks, list[StateCheck])
    except msgspec.ValidationError as error:
        raise ValueError(f"{STATE_CHECKS}: {error}") from error

    if not 1 <= len(checks) <= MAX_CHECKS:
        raise ValueError(f"{STATE_CHECKS} has {len(checks)} calls: give 1 to {MAX_CHECKS}")

    return checks


async def state_reached(
    checks: Sequence[StateCheck], call: Callable[[ToolCall], Awaitable[tuple[ToolResult, bool]]]
) -> float:
    """1 if every check passes, else 0. Stops at the first check that fails. `call` returns a
    result, and whether it came from a tool. Raises EnvironmentFailure if it did not."""
    for check in checks:
        result, was_answered = await call(check.call())
        if not was_answered:
            raise EnvironmentFailure(f"the state can't be checked: {result.text[:500]}")
        if result.text != check.result:
            return 0.0
    return 1.0
