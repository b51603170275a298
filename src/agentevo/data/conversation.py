"""Converts rows in any of the usual forms into conversations in one form, for chat templates.

    messages   {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}
               OpenAI's chat; also under the key `conversations`
    sharegpt   {"conversations": [{"from": "human", "value": ...}, ...], "system": ...,
                "tools": ...}
    alpaca     {"instruction": ..., "input": ..., "output": ..., "system": ...,
                "history": [[question, answer], ...]}

Messages stay plain mappings with all their original keys (`reasoning_content`, `name`, ...),
because templates read such keys. Tool calls are converted to OpenAI's nesting with parsed
arguments, because templates write the arguments as JSON themselves. A row that breaks a rule raises
RowError. It is never repaired by guessing.

The text of a row with pictures, sounds or films is not enough to answer its question. A model that
sees gets its images, as parts by digest (message_images.py). Any other such row is a bad row, and
its text is never trained on alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentevo.data.images import PART_TYPES
from agentevo.data.message_images import COLUMNS as IMAGE_COLUMNS
from agentevo.data.message_images import ImageCollector, folder_of, is_media, place_images
from agentevo.data.messages import TRAINING_KEYS, is_trained
from agentevo.data.row_report import RowError, RowReport
from agentevo.data.rows import read_rows
from agentevo.errors import BadRequestError
from agentevo.runtime.parsing import parse_json

_COLUMNS = ("images", "videos", "audios")
"""The columns that verl, LLaMA-Factory, ms-swift and TRL use for all media of a row."""
_COLUMN_OF_ONE = ("image", "video", "audio")
"""Columns in which a text can have another meaning, such as the name of a container image."""
_CONVERSATIONS = ("messages", "conversations", "prompt", "query", "chosen", "rejected")
_KIND = re.compile("image|picture|video|audio|file")


def check_no_media(row: Mapping[str, Any], *, may_have_images: bool = False) -> None:
    """Raises RowError for a row with pictures, sounds or films. `may_have_images`: allows images,
    which message_images.py reads."""
    for key in (*_COLUMNS, *_COLUMN_OF_ONE):
        if may_have_images and key in IMAGE_COLUMNS:
            continue
        if is_media(row.get(key), key in _COLUMNS):
            raise RowError(
                "media",
                f"the column {key} has pictures, sounds or films, and models read only text here: "
                "leave out the row, or leave out the column if the text is enough",
            )

    for key in _CONVERSATIONS:
        messages = row.get(key)
        for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
            kind = _other_kind(message)
            if kind is not None and not (may_have_images and kind in PART_TYPES):
                raise RowError(
                    "media",
                    f"{key}: message {number} has a part of type {kind!r}, and models read only "
                    "text here: leave out the row",
                )


def _other_kind(message: Any) -> str | None:
    """The type of a message's part that is not a text. None if there is none."""
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return None
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)]
    return next((str(kind) for kind in kinds if _KIND.search(str(kind))), None)


FORMS = ("messages", "sharegpt", "alpaca")
ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}
"""Maps ShareGPT's `from` to a role."""


@dataclass(frozen=True)
class ChatRow:
    """A row of a data set as a conversation in one form, which ends with a message of the
    assistant."""

    where: str
    """The place of the row in its source."""
    messages: list[dict[str, Any]]
    """Mappings with `role`, `content` (a text) and, for the assistant, `tool_calls`. `weight` 0
    marks an assistant message that is not trained."""
    tools: list[dict[str, Any]] | None = None
    """The JSON schemas of the functions that the assistant may call."""


def read_conversations(
    source: str, form: str, report: RowReport, images: ImageCollector | None = None
) -> Iterator[ChatRow]:
    """Every valid conversation of a source. The report counts all rows and lists the others.
    `form`: one of FORMS, or `auto`. With `auto`, the first row in a known form decides for the
    whole source. `images` reads the images of rows, which become parts by digest; without it, rows
    with images are refused."""
    if images is not None:
        images.folder = folder_of(source)

    for row in read_rows(source):
        report.rows += 1
        try:
            if isinstance(row.value, RowError):
                raise row.value

            if not isinstance(row.value, dict):
                raise RowError(
                    "unknown_form",
                    f"a {type(row.value).__name__}, not an object with keys such as messages",
                )

            check_text(row.value)
            check_no_media(row.value, may_have_images=images is not None)
            if form == "auto":
                form = _detect(row.value)

            yield conversation_of(row.where, row.value, form, images)
        except RowError as error:
            report.add(row.where, error)


def conversation_of(
    where: str,
    value: Mapping[str, Any],
    form: str = "messages",
    images: ImageCollector | None = None,
) -> ChatRow:
    """Converts a row, whose texts have been checked, to a conversation. `images`: as that of
    `read_conversations`. Raises RowError."""
    messages, tools = _CONVERT[form](value)
    if images is not None:
        messages = place_images(messages, dict(value), images)
    return _check_row(where, messages, tools)


_Converted = tuple[list[dict[str, Any]], Any]
"""The messages and the tools of a row."""


def _detect(value: Mapping[str, Any]) -> str:
    if "messages" in value:
        return "messages"

    if "conversations" in value:
        first = (
            next(iter(value["conversations"]), None)
            if isinstance(value["conversations"], list)
            else None
        )
        return "messages" if isinstance(first, dict) and "role" in first else "sharegpt"

    if "instruction" in value and "output" in value:
        return "alpaca"

    keys = ", ".join(list(value)[:6]) or "no key"
    raise RowError(
        "unknown_form",
        f"has {keys}; a row has messages, conversations, or instruction and output (see "
        "data.format)",
    )


def _of_messages(value: Mapping[str, Any]) -> _Converted:
    if value.get("chat_template_kwargs"):
        raise RowError(
            "template",
            "the row has chat_template_kwargs, but all rows have the same values of the template's "
            "variables: set model.template, and remove the column",
        )

    key = "messages" if "messages" in value else "conversations"
    return [dict(message) for message in _list(value, key)], value.get("tools")


def _of_sharegpt(value: Mapping[str, Any]) -> _Converted:
    messages: list[dict[str, Any]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})

    for number, item in enumerate(_list(value, "conversations"), start=1):
        speaker = item.get("from")
        text = item.get("value")
        if speaker not in _SPEAKERS:
            raise RowError(
                "wrong_roles", f"message {number} is from {speaker!r}: use {', '.join(_SPEAKERS)}"
            )

        message = {
            **{k: v for k, v in item.items() if k not in ("from", "value")},
            "role": _SPEAKERS[speaker],
            "content": text,
        }
        if speaker == "function_call":
            calls = _json(text, f"message {number} (function_call)", "bad_tool_call")
            message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}

        messages.append(message)

    return messages, value.get("tools")


def _of_alpaca(value: Mapping[str, Any]) -> _Converted:
    if "instruction" not in value or "output" not in value:
        raise RowError(
            "unknown_form", "has no instruction or no output, which every row of an Alpaca file has"
        )

    messages = [{"role": "system", "content": value["system"]}] if value.get("system") else []
    history = value.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise RowError("unknown_form", "history is not a list of [question, answer]")

    for question, answer in history:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    question = [value["instruction"], *([value["input"]] if value.get("input") else [])]
    if not all(isinstance(part, str) for part in question):
        raise RowError("unknown_form", "instruction or input is not a text")

    messages += [
        {"role": "user", "content": "\n\n".join(question)},
        {"role": "assistant", "content": value["output"]},
    ]
    return messages, None


_CONVERT: dict[str, Callable[[Mapping[str, Any]], _Converted]] = {
    "messages": _of_messages,
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
}


def _check_row(where: str, messages: list[dict[str, Any]], tools: Any) -> ChatRow:
    """Makes a row of messages that follow every rule of a conversation. Messages after the
    assistant's last one are dropped, because no answer follows them."""
    if not messages:
        raise RowError("empty", "no messages")

    for number, message in enumerate(messages, start=1):
        _check_message(message, number)

    while messages and messages[-1]["role"] != "assistant":
        messages.pop()

    if not messages:
        raise RowError("wrong_roles", "no message of role assistant: there is nothing to learn")

    _check_order(messages)
    if isinstance(tools, str):
        tools = _json(tools, "tools", "bad_tool_call") if tools.strip() else None

    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise RowError("bad_tool_call", "tools is not a list of JSON schemas")

    return ChatRow(where, messages, tools or None)


def _check_message(message: dict[str, Any], number: int) -> None:
    """Checks a message in place. Converts its content to a text and its tool calls to OpenAI's
    nesting."""
    role = message.get("role")
    if role not in ROLES:
        raise RowError(
            "wrong_roles", f"message {number} has the role {role!r}: use {', '.join(ROLES)}"
        )

    calls = message.get("tool_calls")
    message["content"] = _content(message.get("content"), number)
    if isinstance(message["content"], list) and role == "assistant":
        raise RowError(
            "image", f"message {number} is the assistant's and has an image: it writes text only"
        )

    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RowError(
                "bad_tool_call",
                f"message {number}: tool_calls must be a list, in a message of the assistant",
            )
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    else:
        message.pop("tool_calls", None)

    says_nothing = isinstance(message["content"], str) and not message["content"].strip()
    if says_nothing and role != "tool" and not calls:
        raise RowError("empty", f"message {number} (of role {role}) says nothing")

    _check_id(message.get("tool_call_id"), number)
    _mark_untrained(message, number)


def _mark_untrained(message: dict[str, Any], number: int) -> None:
    """Replaces the keys that say whether a message is trained with `weight` 0, or removes them."""
    try:
        trained = is_trained(message, f"message {number}")
    except BadRequestError as error:
        raise RowError("unknown_form", str(error)) from error

    if trained and message["role"] != "assistant" and not message.keys() & {"weight", "masked"}:
        raise RowError(
            "unknown_form",
            f"message {number} (of role {message['role']}) is marked as trained, and only the "
            "assistant's messages are trained: remove the mark",
        )

    for key in TRAINING_KEYS:
        message.pop(key, None)
    if trained is False and message["role"] == "assistant":
        message["weight"] = 0


def _check_id(name: Any, number: int) -> None:
    if name is not None and not isinstance(name, str | int):
        raise RowError(
            "bad_tool_call",
            f"message {number}: the id of a tool call is a {type(name).__name__}, not a text",
        )


def _check_order(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise RowError(
            "wrong_roles",
            f"message {roles.index('system', 1) + 1} has the role system, which only the first "
            "message may have",
        )

    start = 1 if roles[0] == "system" else 0
    if roles[start] != "user":
        raise RowError(
            "wrong_roles",
            f"it begins with {roles[start]}: the first message after the system's must be from "
            "the user",
        )

    call_ids: set[Any] = set()
    for number in range(start + 1, len(roles)):
        before = roles[number - 1]
        role = roles[number]
        if role == before == "assistant":
            raise RowError(
                "wrong_roles",
                f"messages {number} and {number + 1} are both the assistant's: join them",
            )

        if role == "tool" and before != "tool" and not messages[number - 1].get("tool_calls"):
            raise RowError(
                "wrong_roles",
                f"message {number + 1} has the role tool, but no tool call comes before it",
            )

        call_ids |= {call.get("id") for call in messages[number - 1].get("tool_calls", ())}
        answered = messages[number].get("tool_call_id") if role == "tool" else None
        if answered is not None and None not in call_ids and answered not in call_ids:
            raise RowError(
                "bad_tool_call",
                f"message {number + 1} answers the call {answered!r}, which no message before it "
                "made",
            )


def _is_placed(part: Any) -> bool:
    """Whether it is an image by digest."""
    return isinstance(part, dict) and part.get("type") == "image" and "sha256" in part


def _content(content: Any, number: int) -> str | list[dict[str, Any]]:
    """The content as one text, or as a list of parts if it has an image. None (next to tool calls)
    becomes an empty text."""
    if content is None:
        return ""

    texts = [part for part in content if not _is_placed(part)] if isinstance(content, list) else []
    if isinstance(content, list) and len(texts) < len(content):
        _content(texts, number)
        return content

    if isinstance(content, list):
        if not all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        ):
            raise RowError(
                "unknown_form",
                f"message {number} has content other than text, which can't be trained on",
            )

        return "".join(part["text"] for part in content)

    if not isinstance(content, str):
        raise RowError(
            "unknown_form", f"message {number}: content is a {type(content).__name__}, not a text"
        )

    return content


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A tool call as {"id"?, "type": "function", "function": {"name", "arguments": {...}}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise RowError(
            "bad_tool_call",
            f"message {number}: a tool call has no name: write {{'name': ..., 'arguments': "
            f"{{...}}}}",
        )

    _check_id(call.get("id"), number)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = (
            _json(
                arguments, f"message {number}: the arguments of {function['name']}", "bad_tool_call"
            )
            if arguments.strip()
            else {}
        )

    if not isinstance(arguments, dict):
        raise RowError(
            "bad_tool_call",
            f"message {number}: the arguments of {function['name']} are not a JSON object",
        )

    id_field = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **id_field,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _list(value: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    if key not in value:
        raise RowError("unknown_form", f"has no {key}, which the first row of the file has")

    items = value[key]
    if isinstance(items, str):  # tables often store lists as JSON
        items = _json(items, key, "unknown_form")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RowError("unknown_form", f"{key} is not a list of messages")
    if not items:
        raise RowError("empty", f"{key} is empty")

    return items


def _json(text: Any, what: str, reason: str) -> Any:
    try:
        return parse_json(text)
    except (TypeError, ValueError) as error:
        raise RowError(reason, f"{what}: is not JSON ({error})") from error


def check_text(value: Any) -> None:
    """Raises RowError for a text with half of a surrogate pair (`\\ud83d` alone, from a text that
    was cut in the middle), which no tokenizer accepts."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                "not_utf8",
                f"character {error.start} of a text is half of a surrogate pair: "
                f"{value[error.start]!r}",
            ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)
    elif isinstance(value, list):
        for item in value:
            check_text(item)
