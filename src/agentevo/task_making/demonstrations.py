"""Conversations that solve made tasks, for `agentevo sft`: by the calls that were carried out when
the task was made, with what they gave then."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.task_making.scenario import steps_of

DONE = "Done."


def demonstration(
    row: Mapping[str, Any], specs: Sequence[Mapping[str, Any]], system: str = ""
) -> dict[str, Any]:
    """The conversation of one task. `specs`: the tools in OpenAI's form; `system`: the agent's
    system message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": row["query"]})
    for number, step in enumerate(steps_of(row)):
        arguments = json.dumps(step.arguments, ensure_ascii=False)
        call = {
            "id": f"call_{number + 1}",
            "type": "function",
            "function": {"name": step.tool, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": step.result})

    messages.append({"role": "assistant", "content": str(row.get("answer") or DONE)})
    return {"messages": messages, "tools": list(specs)}
