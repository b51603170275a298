"""Items of OpenAI's Responses API -> messages.

One answer of the policy is several items (a thought, a text, each tool call) and one message. So
adjacent items of the assistant become one message again. The ids of the gateway's own items name
their answer, and `ID_PARTS` reads them: they join the items of an answer even if results of tools
are between its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError, shown
from agentevo.types import ImagePart, Message, TextPart

ID_PARTS = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{48})_\d+")
"""An id of ours; the group is the answer's."""
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


@dataclass(slots=True)
class _AnsweredItems:
    """An assistant's message that is being put together."""

    answer_id: str | None
    """The id of the answer, read from an id that this gateway made."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def as_message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "".join(self.texts),
            "tool_calls": self.calls,
            "reasoning_content": "".join(self.thoughts) or None,
        }

    def takes(self, kind: str) -> bool:
        """Whether an item of this type can belong to this answer. Without an id, a text or a
        thought after a text begins another answer, unless a call is between them."""
        return kind == "function_call" or bool(self.calls) or not self.texts


class _Drafts:
    """Messages on the way."""

    def __init__(self) -> None:
        self.all: list[_AnsweredItems | dict[str, Any]] = []
        self.last_answer: _AnsweredItems | None = None
        """The assistant's message that only results of tools follow."""

    def answer_of(self, item: Mapping[str, Any], kind: str) -> _AnsweredItems:
        """The answer that an item belongs to; a new one if there is none."""
        parts = ID_PARTS.fullmatch(str(item.get("id")))
        answer_id = parts[1] if parts else None
        last = self.last_answer
        if last is not None:
            if answer_id is not None and last.answer_id is not None:
                if answer_id == last.answer_id:
                    return last
            elif last is self.all[-1] and last.takes(kind):
                last.answer_id = last.answer_id or answer_id
                return last

        self.last_answer = _AnsweredItems(answer_id)
        self.all.append(self.last_answer)
        return self.last_answer


def name_within(namespace: str, name: str) -> str:
    """The policy's name for a tool of a namespace."""
    return f"{namespace}__{name}"


def messages_of_items(raw_input: Any, memory: Memory, images: RequestImages) -> list[Message]:
    """The messages of an `input`, which is a text or a list of items. `memory` has the items that
    can be named by their id. Raises BadRequestError or Refusal for a malformed input."""
    if isinstance(raw_input, str):
        return [Message("user", raw_input)]
    if not isinstance(raw_input, Sequence):
        raise BadRequestError("input must be a text or a list of items")

    drafts = _Drafts()
    for number, value in enumerate(raw_input, start=1):
        where = f"item {number} of input"
        item = _check_item(value, where, memory)
        kind = item["type"]
        if kind == "function_call_output":
            drafts.all.append(_result(item, where, images))
        elif kind == "message" and item["role"] != "assistant":
            content = _content(item.get("content"), ("input_text", "output_text"), where, images)
            drafts.all.append({"role": _ROLES[item["role"]], "content": content})
            drafts.last_answer = None
        else:
            _add(drafts.answer_of(item, kind), item, kind, where)

    return messages_of(
        [draft.as_message if isinstance(draft, _AnsweredItems) else draft for draft in drafts.all]
    )


def _check_item(value: Any, where: str, memory: Memory) -> dict[str, Any]:
    """The item with its type."""
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{where} is {shown(value)}: give an object with a type")

    kind = value.get("type") or ("message" if "role" in value else None)
    if kind == "item_reference":
        stored_item = memory.find(str(value.get("id")))
        if not isinstance(stored_item, dict):
            raise Refusal(
                f"{where} refers to {shown(value.get('id'))}, which is not of this session, or is "
                "no longer kept: send the item itself",
                status=404,
                param="input",
            )

        return stored_item

    if kind not in _KINDS:
        raise BadRequestError(
            f"{where} is of type {shown(kind)}: the policy knows {', '.join(_KINDS)}"
        )

    if value.get("encrypted_content"):
        raise BadRequestError(
            f"{where} has an encrypted_content, which this gateway did not write: leave it out"
        )

    if kind == "message" and (
        not isinstance(value.get("role"), str) or value["role"] not in _ROLES
    ):
        raise BadRequestError(
            f"{where} has the role {shown(value.get('role'))}: use {', '.join(_ROLES)}"
        )

    return {**value, "type": kind}


def _add(answer: _AnsweredItems, item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        answer.texts.append(_text(item.get("content"), ("output_text", "input_text"), where))
    elif kind == "reasoning":
        thought = _text(item.get("content") or [], ("reasoning_text",), where)
        answer.thoughts.append(thought or _text(item.get("summary"), ("summary_text",), where))
    else:
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequestError(f"{where} has no name: a function_call names its function")
        namespace = item.get("namespace")
        if namespace is not None:
            if not isinstance(namespace, str):
                raise BadRequestError(f"{where}: namespace is {shown(namespace)}, not a text")
            name = name_within(namespace, name)
        function = {"name": name, "arguments": item.get("arguments") or ""}
        answer.calls.append({"id": _call_id(item, where), "function": function})


def _result(item: Mapping[str, Any], where: str, images: RequestImages) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": _content(item.get("output"), ("input_text",), where, images),
        "tool_call_id": _call_id(item, where),
        "name": item.get("name"),
    }


def _call_id(item: Mapping[str, Any], where: str) -> str | None:
    call_id = item.get("call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise BadRequestError(f"{where}: call_id is {shown(call_id)}, not a text")
    return call_id


def _content(
    content: Any, kinds: Sequence[str], where: str, images: RequestImages
) -> str | list[TextPart | ImagePart]:
    """A content, which is a text or a list of images and of texts of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequestError(f"{where} has no content: give a text or a list of parts")

    parts: list[TextPart | ImagePart] = []
    for number, part in enumerate(content, start=1):
        place = f"part {number} of {where}"
        if isinstance(part, Mapping) and part.get("type") == "input_image":
            parts.append(images.read(part, place))
        else:
            parts.append(TextPart(_text_of_part(part, kinds, place)))
    return parts


def _text(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a content, which is one or a list of parts of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequestError(f"{where} has no content: give a text or a list of parts")

    return "".join(
        _text_of_part(part, kinds, f"part {number} of {where}")
        for number, part in enumerate(content, start=1)
    )


def _text_of_part(part: Any, kinds: Sequence[str], where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in kinds or not isinstance(text, str):
        raise BadRequestError(
            f"{where} is {shown(kind)}: the policy reads texts and the user's images, as  "
            f'{{"type": "{kinds[0]}", "text": ...}}  and  '
            '{"type": "input_image", "image_url": "data:image/png;base64,..."}'
        )
    return text
