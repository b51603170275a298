"""Checks messages and tools in OpenAI's form, and converts them to types.Message.

    {"role": "assistant", "content": "text", "reasoning_content": "...",
     "tool_calls": [{"id": "c1", "type": "function",
                     "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}
    {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    {"role": "user", "content": [{"type": "text", "text": "What is this?"},
                                 {"type": "image", "sha256": "...", "media_type": "image/png"}]}

The arguments of a tool call keep their exact text. A mapping becomes JSON. Nothing is repaired by
guessing: an invalid message raises BadRequestError with its place and the correct form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, get_args

import msgspec

from agentevo.data.images import is_image_part
from agentevo.errors import BadRequestError, shown
from agentevo.types import ImagePart, Message, Role, TextPart, ToolCall
from agentevo.types.content import content_of

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys with the assistant's reasoning in data sets, clients and templates."""
TRAINING_KEYS = ("weight", "train", "training", "loss", "loss_scale", "masked")
"""The keys in data sets for whether a message is trained. They come from OpenAI's fine-tuning,
Axolotl (two keys), ms-swift (two keys) and torchtune, whose key `masked` means untrained."""
_SPANS = ("train_detail", "training_detail")
"""Axolotl's keys for the trained parts of a message."""
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS)
_ROLES = get_args(Role)


class ImageReader(Protocol):
    """Reads images of messages, such as an ImageCollector."""

    def read(self, source: Any, where: str) -> ImagePart:
        """The image in any form of data/images.py, as a part by digest. Raises ImageError."""
        ...


def messages_of(values: Sequence[Any], images: ImageReader | None = None) -> list[Message]:
    """Messages, each given as a Message or as a mapping in OpenAI's form. `images` reads the parts
    that hold an image (data/images.py), which becomes a part by digest; without it, they are
    refused."""
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise BadRequestError(
            f"messages is a {type(values).__name__}: give a list such as "
            '[{"role": "user", "content": "..."}]'
        )
    return [
        _message(value, f"message {number}", images) for number, value in enumerate(values, start=1)
    ]


def is_trained(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message of a data set is marked as trained, by its TRAINING_KEYS. A null does not
    count. None if it has no mark. Raises BadRequestError for a value that is neither yes nor no."""
    spans = next((key for key in _SPANS if message.get(key)), None)
    if spans is not None:
        raise BadRequestError(
            f"{where} has {spans}, but messages are only trained as a whole: use train"
        )

    marks: dict[str, bool] = {}
    for key in TRAINING_KEYS:
        value = message.get(key)
        if value is None:
            continue

        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRequestError(
                f"{where} has {key} {shown(value)}: use 0 or false for untrained, 1 or true for "
                "trained"
            )

        marks[key] = bool(value) is not (key == "masked")

    if len(set(marks.values())) > 1:
        keys = ", ".join(f"{key} {message[key]!r}" for key in marks)
        raise BadRequestError(f"{where} has {keys}, which contradict each other: keep one of them")

    return next(iter(marks.values()), None)


def with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the missing tool names of results filled in from their calls. Clients
    leave the names out, and some templates write them."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls if call.id}
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            message = msgspec.structs.replace(message, name=names[message.tool_call_id])
        named.append(message)

    return named


def tools_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools, each the JSON schema of a function: `{"type": "function", "function": {"name": ...,
    "description": ..., "parameters": {...}}}`."""
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise BadRequestError(f"tools is a {type(values).__name__}: give a list of JSON schemas")

    tools = []
    for number, tool in enumerate(values, start=1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise BadRequestError(
                f"tool {number} has no function with a name: write "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )

        if not isinstance(function.get("strict"), bool | None):
            raise BadRequestError(
                f"tool {number}: strict is {shown(function['strict'])}: give true or false"
            )

        tools.append(dict(tool))

    try:
        json.dumps(tools)
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"the tools can't be written as JSON: {error}") from error

    return tools


def _message(value: Any, where: str, images: ImageReader | None) -> Message:
    if isinstance(value, Message):
        return value

    if not isinstance(value, Mapping):
        raise BadRequestError(
            f"{where} is a {type(value).__name__}: give a Message or a mapping with role and "
            "content"
        )

    if value.get("role") not in _ROLES:
        raise BadRequestError(
            f"{where} has the role {value.get('role')!r}: use {', '.join(_ROLES)}"
        )

    role = cast(Role, value["role"])
    unknown = [key for key, item in value.items() if key not in MESSAGE_KEYS and item]
    if unknown:
        raise BadRequestError(
            f"{where} has {unknown[0]!r}: a message has {', '.join(MESSAGE_KEYS)}"
        )

    calls = _tool_calls(value.get("tool_calls"), role, where)
    tool_call_id = _text(value, "tool_call_id", where)
    if tool_call_id is not None and role != "tool":
        raise BadRequestError(f"{where} has a tool_call_id, but its role is {role}, not tool")

    reasoning = next((text for key in REASONING_KEYS if (text := _text(value, key, where))), None)
    return Message(
        role,
        _content(value.get("content"), bool(calls) or reasoning is not None, where, images),
        calls,
        tool_call_id,
        _text(value, "name", where),
        reasoning,
    )


def _text(value: Mapping[str, Any], key: str, where: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise BadRequestError(f"{where}: {key} is a {type(text).__name__}, not a text")
    return text


def _content(
    content: Any, may_be_none: bool, where: str, images: ImageReader | None
) -> str | tuple[TextPart | ImagePart, ...]:
    """The content, in its only form (types/content.py)."""
    if isinstance(content, str):
        return content
    if content is None and may_be_none:
        return ""

    if not isinstance(content, Sequence):
        kind = "missing" if content is None else f"a {type(content).__name__}"
        raise BadRequestError(f"{where}: content is {kind}: give a text or a list of parts")

    parts = [_part(part, f"{where}, part {n}", images) for n, part in enumerate(content, start=1)]
    return content_of(parts)


def _part(part: Any, where: str, images: ImageReader | None) -> TextPart | ImagePart:
    if isinstance(part, TextPart | ImagePart):
        return part
    if images is not None and is_image_part(part) and "sha256" not in part:
        return images.read(part, where)

    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "image"):
        raise BadRequestError(
            f'{where} is of type {kind!r}: use {{"type": "text", "text": ...}}, and leave out what '
            "models don't read here"
        )

    try:
        return msgspec.convert(part, TextPart | ImagePart)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{where}: {error}") from error


def _tool_calls(calls: Any, role: str, where: str) -> tuple[ToolCall, ...]:
    if not calls:
        return ()
    if role != "assistant" or not isinstance(calls, Sequence):
        raise BadRequestError(f"{where}: tool_calls must be a list, in a message of the assistant")
    return tuple(_tool_call(call, f"{where}, tool call {n}") for n, call in enumerate(calls, 1))


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call

    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise BadRequestError(
            f"{where} has no name: write "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        )

    arguments = function.get("arguments", "")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)

    if not isinstance(arguments, str):
        raise BadRequestError(
            f"{where}: the arguments of {name} are a {type(arguments).__name__}: give a text or a "
            "mapping"
        )

    return ToolCall(name, arguments, _text(call, "id", where) or "")
