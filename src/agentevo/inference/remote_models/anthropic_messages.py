"""A client of Anthropic's Messages API: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.errors import BadRequestError
from agentevo.inference.remote_models.images import EncodedImage
from agentevo.inference.remote_models.wire import (
    BadAnswerError,
    RemoteReply,
    Usage,
    Wire,
    WireRequest,
    with_call_ids,
)
from agentevo.models.chat.answer_form import ANY_OBJECT, AnswerForm
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.types import ImagePart, Message, TextPart, ToolCall
from agentevo.types.content import parts_of

VERSION = "2023-06-01"
_CHOICES = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}


def body_of(url: str, model: str, request: WireRequest) -> dict[str, Any]:
    """See Wire.body. The API has no seeds, so a seed has no effect."""
    sampling = request.sampling
    if sampling.min_p is not None:
        raise BadRequestError("min_p: Anthropic's API has no such setting: leave it out")

    messages = with_call_ids(request.messages)
    system = "\n\n".join(message.text for message in messages if message.role == "system")
    fields = {
        "system": system or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_sequences": None if sampling.stop_strings is None else list(sampling.stop_strings),
    }
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_new_tokens,
        "messages": _messages(messages, request.images),
        **{name: value for name, value in fields.items() if value is not None},
    }
    if request.tools:
        named = {"type": "tool", "name": request.tool_choice}
        body["tools"] = [_tool(tool["function"]) for tool in request.tools]
        body["tool_choice"] = _CHOICES.get(request.tool_choice, named)
    elif any(message.tool_calls or message.role == "tool" for message in messages):
        body |= {"tools": _tools_in_history(messages), "tool_choice": _CHOICES["none"]}

    return body if request.form is None else _with_form(body, request.form)


def _tools_in_history(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Definitions of the tools that a history calls. This API accepts no calls in the history
    without definitions of tools. Other APIs do, so their requests can leave the tools out."""
    names = dict.fromkeys(call.name for message in messages for call in message.tool_calls)
    return [_tool({"name": name}) for name in names or ("tool",)]


def _with_form(body: dict[str, Any], form: AnswerForm) -> dict[str, Any]:
    if form.schema == ANY_OBJECT or isinstance(form.schema, bool):
        raise BadRequestError(
            "Anthropic's API can only enforce a JSON schema: give the schema of an object "
            "instead of json_object"
        )

    if form.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": form.schema}}
    if "tool_choice" in body and not form.parallel and body["tool_choice"] != _CHOICES["none"]:
        body["tool_choice"] = {**body["tool_choice"], "disable_parallel_tool_use": True}

    return body


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": function["description"]} if function.get("description") else {}
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    strict = {"strict": True} if function.get("strict") else {}
    return {"name": function["name"], **described, "input_schema": schema, **strict}


def _messages(
    messages: Sequence[Message], images: Mapping[str, EncodedImage]
) -> list[dict[str, Any]]:
    """The messages as content blocks in turns of user and assistant. Results of tools belong to the
    user."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += _blocks(message, images)

    return [turn for turn in turns if turn["content"]]


def _blocks(message: Message, images: Mapping[str, EncodedImage]) -> list[dict[str, Any]]:
    blocks = [
        _block(part, images)
        for part in parts_of(message)
        if isinstance(part, ImagePart) or part.text.strip()  # the API refuses an empty text
    ]
    if message.role == "tool":
        has_images = any(block["type"] == "image" for block in blocks)
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        return [{**result, "content": blocks if has_images else message.text}]

    for call in message.tool_calls:
        use = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**use, "input": _arguments(call)})

    return blocks


def _block(part: TextPart | ImagePart, images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    image = images[part.sha256]
    source = {"type": "base64", "media_type": image.media_type, "data": image.data}
    return {"type": "image", "source": source}


def _arguments(call: ToolCall) -> Any:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None

    if not isinstance(arguments, dict):
        raise BadRequestError(
            f"the arguments of a call of {call.name} are not a JSON object, which Anthropic's API "
            "requires: leave the call out, or correct it"
        )

    return arguments


def reply_of(answer: Mapping[str, Any]) -> RemoteReply:
    """See Wire.reply."""
    try:
        blocks = answer["content"]
        calls = tuple(
            ToolCall(block["name"], json.dumps(block["input"], ensure_ascii=False), block["id"])
            for block in blocks
            if block["type"] == "tool_use"
        )
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        message = Message("assistant", "".join(texts), calls, reasoning="".join(thoughts) or None)
        return RemoteReply(
            message=message,
            finish_reason="length" if answer.get("stop_reason") == "max_tokens" else "stop",
            usage=_usage(answer.get("usage")),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswerError(f"no message ({type(error).__name__}: {error})") from error


class StreamedMessage:
    """See wire.StreamedAnswer. It reads the events of one message."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, list[str]] = {}
        """The content of each block so far: text, thought or JSON."""
        self._usage: dict[str, Any] = {}
        self._stop_reason: str | None = None
        self._is_whole = False

    def add(self, event: Any) -> Sequence[ContentDelta | ReasoningDelta]:
        match event["type"]:
            case "message_start":
                self._count(event["message"].get("usage"))
            case "content_block_start":
                self._blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                return self._add_part(event["index"], event["delta"])
            case "message_delta":
                self._stop_reason = event["delta"].get("stop_reason") or self._stop_reason
                self._count(event.get("usage"))
            case "message_stop":
                self._is_whole = True
            case "error":
                raise BadAnswerError(f"it failed in the middle: {event['error']['message']}")

        return []

    def _add_part(
        self, block: int, delta: Mapping[str, Any]
    ) -> Sequence[ContentDelta | ReasoningDelta]:
        kind = delta["type"]
        field = {"text_delta": "text", "thinking_delta": "thinking"}.get(kind, "partial_json")
        if field not in delta:  # a signature or a citation
            return []

        text = delta[field]
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} instead of a text")

        self._parts.setdefault(block, []).append(text)
        if not text or field == "partial_json":
            return []

        return [ContentDelta(text) if field == "text" else ReasoningDelta(text)]

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        self._usage |= {name: count for name, count in (usage or {}).items() if count is not None}

    def answer(self) -> Mapping[str, Any]:
        if not self._is_whole:
            raise BadAnswerError("it ended in the middle")

        for number, block in self._blocks.items():
            text = "".join(self._parts.get(number, ()))
            if block["type"] == "tool_use":
                block["input"] = json.loads(text) if text else block.get("input", {})
            elif block["type"] in ("text", "thinking"):
                block[block["type"]] = text

        blocks = [self._blocks[number] for number in sorted(self._blocks)]
        return {"content": blocks, "stop_reason": self._stop_reason, "usage": self._usage}


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, Mapping) or "input_tokens" not in usage:
        return None

    cached = int(usage.get("cache_read_input_tokens") or 0)
    written = int(usage.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=int(usage["input_tokens"]) + cached + written,
        cached_tokens=cached,
        completion_tokens=int(usage.get("output_tokens") or 0),
    )


def _headers(key: str | None) -> dict[str, str]:
    return {"anthropic-version": VERSION} | ({} if key is None else {"x-api-key": key})


WIRE = Wire(
    path=lambda url: f"{url.removesuffix('/v1')}/v1/messages",
    headers=_headers,
    body=body_of,
    reply=reply_of,
    stream={"stream": True},
    streamed=StreamedMessage,
)
