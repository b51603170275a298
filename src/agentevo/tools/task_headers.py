"""How a server at a URL is told of the task of an attempt: by headers of its session's requests."""

from __future__ import annotations

import base64

import msgspec

from agentevo.errors import EnvironmentFailure
from agentevo.types import Task

TASK_HEADER = "agentevo-task"
"""The task as JSON, in base64: headers take no other characters than ASCII's."""
SEED_HEADER = "agentevo-seed"
LARGEST_TASK = 24 * 2**10
"""Bytes of JSON: servers take some tens of kibibytes of headers."""


def task_headers(task: Task, seed: int, server: str) -> dict[str, str]:
    """Raises EnvironmentFailure for a task that headers can't hold."""
    content = msgspec.json.encode(task)
    if len(content) > LARGEST_TASK:
        raise EnvironmentFailure(
            f"the task {task.id!r} has {len(content):,} bytes, and `send_task` of the MCP server "
            f"{server!r} can tell of {LARGEST_TASK:,}: use a server that is started by a `command`"
        )
    return {TASK_HEADER: base64.b64encode(content).decode(), SEED_HEADER: str(seed)}
