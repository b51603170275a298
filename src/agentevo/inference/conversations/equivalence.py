"""Decides whether a message that a client sends back means a recorded message although its text
differs.

Clients store a conversation in their own format, and this changes an answer. Tool calls lose the
order of their keys, their spaces and escapes. Text is stripped. Reasoning is left out or moves into
the content. Ids of calls are left out, or replaced both in a call and in its result. These changes
keep the meaning: such a message has the same `key_of` as the recorded one, and is `compatible` with
it. The key contains everything that affects what a tool does or what the model has read, so 1 and
1.0 differ. If a call comes back with an id that AgentEvo created, it means the recorded call, even
if the client's JSON lost parts of its arguments (`names_calls`).

Parts that may be missing (reasoning, the name of a tool, ids) are not in a key, because a missing
part matches any other. `compatible` compares them if both messages have them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

from agentevo.types import ImagePart, Message, TextPart

Undone = Literal[
    "arguments_rewritten",
    "whitespace_stripped",
    "reasoning_dropped",
    "reasoning_moved",
    "call_ids_changed",
    "name_dropped",
    "content_in_parts",
]
"""How a message may differ from the recorded message that it means."""
Edit = Literal[
    "system_changed",
    "user_edited",
    "tool_result_edited",
    "content_edited",
    "tool_calls_edited",
    "reasoning_edited",
    "other",
]
"""How a message differs from the recorded message that was in its place."""
_EDITS: dict[str, Edit] = {
    "system": "system_changed",
    "user": "user_edited",
    "tool": "tool_result_edited",
}

Content = str | tuple[TextPart | ImagePart, ...]


class Parts(NamedTuple):
    """The content of an assistant's message, in a form that is the same for all ways to write
    it."""

    content: Content
    """The text without whitespace at its ends and without reasoning."""
    calls: tuple[tuple[str, str], ...]
    """Names and canonical arguments."""
    reasoning: str
    """The reasoning; empty if there is none."""


def parts_of(message: Message) -> Parts:
    """Splits a message into its parts. Text in the content before </think> is reasoning."""
    calls = tuple((call.name, canonical_arguments(call.arguments)) for call in message.tool_calls)
    content, reasoning = _answer_and_thought(message)
    return Parts(content, calls, reasoning)


def _answer_and_thought(message: Message) -> tuple[Content, str]:
    reasoning = (message.reasoning or "").strip()
    content = _content(message)
    if isinstance(content, str):
        content = content.strip()
        thought, closed, answer = content.partition("</think>")
        if closed:
            thought = thought.removeprefix("<think>").strip()
            if not reasoning or reasoning == thought:
                return answer.strip(), thought

    return content, reasoning


def canonical_arguments(text: str) -> str:
    """The arguments of a call as canonical JSON. Missing arguments become an empty object. Text
    that is not JSON is unchanged."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return text.strip()


def names_calls(form: Message, came: Message) -> bool:
    """Whether `came` has the calls of a recorded message: the same ids, and the same arguments
    except for what JavaScript's JSON and schema libraries change. These turn 1.0 into 1, round
    large numbers, drop keys that a schema lacks, and set missing keys to null."""
    if not form.tool_calls or len(form.tool_calls) != len(came.tool_calls):
        return False
    return parts_of(form).content == parts_of(came).content and all(
        call.id
        and (call.id, call.name) == (tool_call.id, tool_call.name)
        and _arguments_left(call.arguments, tool_call.arguments)
        for call, tool_call in zip(form.tool_calls, came.tool_calls, strict=True)
    )


def _arguments_left(recorded: str, came: str) -> bool:
    canonical = canonical_arguments(recorded), canonical_arguments(came)
    if canonical[0] == canonical[1]:
        return True
    try:
        return _is_left_of(*map(json.loads, canonical))
    except (ValueError, RecursionError):
        return False


def _is_left_of(recorded: Any, came: Any) -> bool:
    match recorded, came:
        case (bool(), _) | (_, bool()):
            return recorded is came
        case int() | float(), int() | float():
            try:
                return float(recorded) == float(came)
            except OverflowError:
                return bool(recorded == came)
        case dict(), dict():
            return all(
                _is_left_of(recorded[key], value) if key in recorded else value is None
                for key, value in came.items()
            )
        case list(), list():
            return len(recorded) == len(came) and all(map(_is_left_of, recorded, came))
        case _:
            return bool(recorded == came)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _content(message: Message) -> Content:
    """A content that consists of texts is joined into one text."""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, ImagePart) for part in message.content):
        return message.content
    return message.text


def places_of(messages: Sequence[Message]) -> list[int]:
    """For each message of role `tool`, the index of the call that it answers in the preceding
    assistant's message: the call with the same id, otherwise by the order of the results. -1 for
    all other messages."""
    places: list[int] = []
    ids: dict[str, int] = {}
    results = 0
    for message in messages:
        if message.role == "tool":
            places.append(ids.get(message.tool_call_id or "", results))
            results += 1
        else:
            places.append(-1)
            results = 0
            ids = {call.id: n for n, call in enumerate(message.tool_calls) if call.id}

    return places


def key_of(message: Message, place: int) -> Hashable:
    """A key that is equal for all ways to write one message. `place`: see places_of."""
    if message.role == "assistant":
        parts = parts_of(message)
        return "assistant", parts.content, parts.calls
    if message.role == "tool":
        return "tool", place, _content(message)
    return message.role, message.name, _content(message)


def compatible(forms: Sequence[Message], came: Message) -> bool:
    """Whether `came` has the reasoning and the tool's name of a recorded message with the same key,
    or lacks them. `forms` are the known forms of the recorded message."""
    if came.role == "assistant":
        _, thought = _answer_and_thought(came)
        return not thought or any(_answer_and_thought(form)[1] == thought for form in forms)
    if came.role == "tool":
        return came.name is None or any(form.name in (None, came.name) for form in forms)
    return True


def undone(forms: Sequence[Message], came: Message) -> list[Undone]:
    """The differences between a message that came back and the nearest form of the recorded message
    that it means."""
    key = key_of(came, -1)
    alike = [form for form in forms if key_of(form, -1) == key or names_calls(form, came)]
    return min((_find_rewrites(form, came) for form in alike), key=len, default=[])


def _find_rewrites(form: Message, came: Message) -> list[Undone]:
    changes: list[Undone] = []
    if [call.arguments for call in form.tool_calls] != [call.arguments for call in came.tool_calls]:
        changes.append("arguments_rewritten")

    ids = [call.id for call in form.tool_calls], [call.id for call in came.tool_calls]
    if ids[0] != ids[1] or form.tool_call_id != came.tool_call_id:
        changes.append("call_ids_changed")
    if form.name != came.name:
        changes.append("name_dropped")
    if not isinstance(came.content, str) and came.content != form.content:
        changes.append("content_in_parts")
    if came.role == "assistant":
        changes += _find_restyling(form, came)

    return changes


def _find_restyling(form: Message, came: Message) -> list[Undone]:
    """The differences in an assistant's text and reasoning."""
    recorded = parts_of(form).reasoning
    returned = parts_of(came).reasoning
    if recorded and not returned:
        return ["reasoning_dropped"]
    if bool(form.reasoning) != bool(came.reasoning):
        return ["reasoning_moved"]

    texts = (form.text, form.reasoning or ""), (came.text, came.reasoning or "")
    return ["whitespace_stripped"] if texts[0] != texts[1] else []


def edit(forms: Sequence[Message], came: Message) -> Edit | Undone:
    """The edit between a recorded message and the message that came back in its place. If nothing
    was edited, how the text differs."""
    recorded = forms[-1]
    if recorded.role != came.role:
        return "system_changed" if came.role == "system" else "other"
    if came.role != "assistant":
        return _EDITS[came.role]

    before = parts_of(recorded)
    now = parts_of(came)
    if before.calls != now.calls:
        return "tool_calls_edited"
    if before.content != now.content:
        return "content_edited"
    if now.reasoning and before.reasoning != now.reasoning:
        return "reasoning_edited"

    return next(iter(undone(forms, came)), "other")
