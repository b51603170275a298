"""Records of OpenAI's APIs.

{"messages": [...], "tools": [...]}                       a conversation, as for fine-tuning
{"messages": [...], "choices": [{"message": ...}]}        a stored chat completion
{"request": {...}, "response": {...}}                     a body and its answer, of either API
{"body": {...}, "response": {"body": {...}}}              likewise, as batches have them
{"input": ..., "output": [...], "instructions": ...}      a response with its input
{"items": [...]}                                          items of the Responses API

Records of Anthropic's Messages API.

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


def calls_of(where: str, row: Mapping[str, Any]) -> list[RecordedCall]:
    """The calls in a row. There are several if a call has several answers. Raises RowError."""
    request, answer = halves(row)
    if "choices" in answer:
        return _of_chat(where, request, answer)
    if "output" in answer or "items" in answer or "input" in request:
        return [_of_responses(where, request, answer)]

    if "response" in row and "messages" in request:
        keys = ", ".join(list(answer)[:6]) or "no key"
        raise RowError(
            "unknown_form",
            f"its response has {keys}; that of a chat completion has choices, that of the "
            "Responses API output, and that of Anthropic's messages content",
        )

    if "messages" in request:
        messages = [message(entry) for entry in objects(request, "messages")]
        return [RecordedCall(where, messages, _tools(request), is_given=True)]

    keys = ", ".join(list(row)[:6]) or "no key"
    raise RowError(
        "unknown_form",
        f"has {keys}; a record of OpenAI's or Anthropic's APIs has messages, request and "
        "response, or input and output; one of OpenTelemetry resourceSpans, or attributes",
    )


def _of_chat(
    where: str, request: Mapping[str, Any], answer: Mapping[str, Any]
) -> list[RecordedCall]:
    history = [message(entry) for entry in objects(request, "messages")]
    choices = objects(answer, "choices")
    calls = []
    for number, choice in enumerate(choices):
        reply = message({"role": "assistant", **choice.get("message", {})})
        if choice.get("finish_reason") in CUT_OFF:
            reply["weight"] = 0
        place = where if len(choices) == 1 else f"{where}, choice {number}"
        model = str(answer.get("model", request.get("model", "")))
        calls.append(RecordedCall(place, [*history, reply], _tools(request), model=model))

    return calls


def _of_responses(
    where: str, request: Mapping[str, Any], answer: Mapping[str, Any]
) -> RecordedCall:
    if answer.get("previous_response_id") or request.get("previous_response_id"):
        raise RowError(
            "unknown_form",
            "it continues a previous_response_id, so it lacks its history: record the whole "
            "input, or the items of the conversation",
        )

    messages: list[dict[str, Any]] = []
    instructions = request.get("instructions", answer.get("instructions"))
    if instructions:
        messages.append({"role": "system", "content": text_of(instructions)})

    is_given = "items" in answer
    history = answer["items"] if is_given else request.get("input", answer.get("input"))
    if isinstance(history, str):
        messages.append({"role": "user", "content": history})
    elif isinstance(history, Sequence):
        messages += _of_items(history)
    else:
        raise RowError("empty", "it lacks its input")

    if not is_given:
        replies = _of_items(objects(answer, "output"))
        if len(replies) != 1:
            raise RowError("empty", f"its output is {len(replies)} messages and not one")
        if answer.get("status") in CUT_OFF:
            replies[0]["weight"] = 0
        messages += replies

    tools = _tools(request) or _tools(answer)
    return RecordedCall(where, messages, tools, is_given, str(answer.get("model", "")))


def _of_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Items of the Responses API as messages. Consecutive items of the assistant become one
    message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            raise RowError("unknown_form", f"an item is a {type(item).__name__}, not an object")

        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            messages.append(message(item))
        elif kind == "function_call_output":
            output = item.get("output")
            result = {"content": text_of(output), "tool_call_id": item.get("call_id")}
            messages.append({"role": "tool", **result})
        elif kind in ("message", "reasoning", "function_call"):
            _add(_answer_at(messages, kind), item, kind)
        else:
            raise RowError(
                "unknown_form", f"an item is of type {kind!r}, which chat templates don't support"
            )

    for converted in messages:
        if converted["role"] == "assistant" and not converted.get("reasoning_content"):
            converted.pop("reasoning_content", None)

    return messages


def _answer_at(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The assistant's message at the end, or a new one. A text or reasoning after a text begins
    another answer."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and (
        kind == "function_call" or last.get("tool_calls") or not last["content"]
    ):
        return last
    messages.append({"role": "assistant", "content": "", "reasoning_content": ""})
    return messages[-1]


def _add(answer: dict[str, Any], item: Mapping[str, Any], kind: str) -> None:
    if kind == "message":
        answer["content"] += text_of(item.get("content"))
    elif kind == "reasoning":
        answer["reasoning_content"] += text_of(item.get("content") or item.get("summary"))
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _tools(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    return tools_of(request.get("tools") or request.get("functions"))


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


def anthropic_calls(where: str, row: Mapping[str, Any]) -> list[RecordedCall]:
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
    return [RecordedCall(where, messages, _anthropic_tools(request), is_given, model)]


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


def _anthropic_tools(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the client runs. Tools of Anthropic's server, such as web_search, have no
    schema and are left out."""
    tools = request.get("tools")
    if not isinstance(tools, Sequence):
        return tools_of(tools)
    is_server = [isinstance(tool, Mapping) and "input_schema" not in tool for tool in tools]
    return tools_of([tool for tool, is_own in zip(tools, is_server, strict=True) if not is_own])
