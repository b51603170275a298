"""Passes the task of an attempt to a server whose entry sets `send_task`. A started server gets the
task in its environment. A server at a URL gets it in the headers of its session's requests.

The policy may be able to read everything that a server knows. So servers never receive the task's
answer, or the metadata about the wanted state and the calls that lead to it.
"""

from __future__ import annotations

import base64

import msgspec

from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS, STATE_CHECKS
from agentevo.errors import EnvironmentFailure
from agentevo.types import Task

TASK_HEADER = "agentevo-task"
"""The task as JSON, in base64, since headers take only ASCII."""
SEED_HEADER = "agentevo-seed"
LARGEST_IN_HEADERS = 24 * 2**10
"""The most bytes of JSON in headers. Servers accept some tens of kibibytes."""
LARGEST_IN_VARIABLE = 64 * 2**10
"""The most bytes of JSON in a variable. Linux accepts 128 KiB."""


def task_variables(task: Task, seed: int, server: str) -> dict[str, str]:
    """The environment variables of a server. Raises EnvironmentFailure for a task that a variable
    can't hold."""
    content = _content(task, LARGEST_IN_VARIABLE, server, "give it a file to read")
    return {"AGENTEVO_TASK": content.decode(), **attempt_variables(task, seed)}


def attempt_variables(task: Task, seed: int) -> dict[str, str]:
    """The environment variables about its attempt that every started server gets."""
    return {"AGENTEVO_TASK_ID": task.id, "AGENTEVO_SEED": str(seed)}


def task_headers(task: Task, seed: int, server: str) -> dict[str, str]:
    """The HTTP headers for a server. Raises EnvironmentFailure for a task that headers can't
    hold."""
    remedy = "use a server that is started by a `command`"
    content = _content(task, LARGEST_IN_HEADERS, server, remedy)
    return {TASK_HEADER: base64.b64encode(content).decode(), SEED_HEADER: str(seed)}


def _content(task: Task, at_most: int, server: str, remedy: str) -> bytes:
    """The task's data as JSON. Raises EnvironmentFailure if it has more than `at_most` bytes."""
    kept_back = (STATE_CHECKS, SOLVED_BY_CALLS)
    metadata = {key: value for key, value in task.metadata.items() if key not in kept_back}
    content = msgspec.json.encode(msgspec.structs.replace(task, answer=None, metadata=metadata))
    if len(content) > at_most:
        raise EnvironmentFailure(
            f"the task {task.id!r} has {len(content):,} bytes, and `send_task` of the MCP server "
            f"{server!r} can pass {at_most:,}: {remedy}"
        )
    return content
