"""Records of Anthropic's Messages API.

{"request": {"system": ..., "messages": [...]}, "response": {"content": [...], ...}}
{"system": ..., "messages": [...], "content": [...], "stop_reason": ...}    both in one
{"system": ..., "messages": [...], "tools": [...]}                          a conversation

The result of a tool, which this API puts into a user's message, becomes a separate message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.data.row_report import RowError
from agentevo.data.traces.call import (
    CUT_OFF,
    RecordedCall,
    halves,
    message,
    objects,
    text_of,
    tools_of,
)

_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
"""The kinds of blocks that only this API has."""


def is_anthropic(row: Mapping[str, Any]) -> bool:
    """Whether a row is clearly a record of this API and not of OpenAI's."""
    request, answer = halves(row)
    if answer is not request and isinstance(answer.get("content"), list):
        return "choices" not in answer and "output" not in answer
    if "stop_reason" in answer or answer.get("type") == "message":
        return True

    messages = request.get("messages")
    if not isinstance(messages, list):
        return False

    kinds = {
        block.get("type")
        for entry in messages
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), list)
        for block in entry["content"]
        if isinstance(block, Mapping)
    }
    return "system" in request or any(kind in kinds for kind in _BLOCKS)


def calls_of(where: str, row: Mapping[str, Any]) -> list[RecordedCall]:
    """The call in a row. Raises RowError."""
    request, answer = halves(row)
    messages: list[dict[str, Any]] = []
    if request.get("system"):
        messages.append({"role": "system", "content": text_of(request["system"])})

    for sent_message in objects(request, "messages"):
        messages += _of_blocks(sent_message)

    is_given = "content" not in answer
    if not is_given:
        (reply,) = _of_blocks({"role": "assistant", "content": answer["content"]}) or [{}]
        if not reply:
            raise RowError("empty", "its answer is empty")
        if answer.get("stop_reason") in CUT_OFF:
            reply["weight"] = 0
        messages.append(reply)

    model = str(answer.get("model", request.get("model", "")))
    return [RecordedCall(where, messages, _tools(request), is_given, model)]


def _of_blocks(blocks_message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message of blocks in OpenAI's form. Results of tools become separate messages."""
    content = blocks_message.get("content")
    if not isinstance(content, list):
        return [message(blocks_message)]

    converted = message({"role": blocks_message.get("role")})
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind == "text":
            converted["content"] += text_of(block.get("text"))
        elif kind == "thinking":
            thought = converted.get("reasoning_content", "") + text_of(block.get("thinking"))
            converted["reasoning_content"] = thought
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            converted.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            result = {"role": "tool", "content": text_of(block.get("content"))}
            results.append(result | {"tool_call_id": block.get("tool_use_id")})
        elif kind != "redacted_thinking":
            raise RowError("unknown_form", f"a message has a block {kind!r}, which is not text")

    is_said = (
        converted["content"] or converted.get("tool_calls") or converted.get("reasoning_content")
    )
    return [*results, *([converted] if is_said else [])]


def _tools(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the client runs. Tools of Anthropic's server, such as web_search, have no
    schema and are left out."""
    tools = request.get("tools")
    if not isinstance(tools, Sequence):
        return tools_of(tools)
    is_server = [isinstance(tool, Mapping) and "input_schema" not in tool for tool in tools]
    return tools_of([tool for tool, is_own in zip(tools, is_server, strict=True) if not is_own])
