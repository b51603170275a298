"""The notation of a model family's tool calls, derived from the output of its chat template: the
text before the name, between name and arguments, between two calls, and after the last call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from agentevo.errors import ModelError
from agentevo.models.tool_calls import ToolCallParser
from agentevo.types import Message, ToolCall

_NAMES = ("probefirstname", "probesecondname")
_ARGUMENTS = re.compile(r'\{\s*"probekey":\s*"probevalue"\s*\}')
_CALLS = tuple(
    ToolCall(name, '{"probekey": "probevalue"}', f"probe{number:04d}")
    for number, name in enumerate(_NAMES)
)


@dataclass(frozen=True)
class CallNotation:
    """See the module."""

    before_name: str
    before_arguments: str
    between: str | None
    """The text from the arguments of one call to the name of the next. None if only one call is
    possible."""
    after: str


_BARE = CallNotation('{"name": "', '", "arguments": ', None, "}")
"""The notation of templates that do not render calls. Such calls are plain JSON."""


def call_notation(parser: ToolCallParser, written: Callable[[Message], str]) -> CallNotation | None:
    """The notation of the family whose calls `parser` reads. `written` renders a message by its
    template. None if calls are not JSON after a name."""
    try:
        one_call, two_calls = (
            written(Message("assistant", "", _CALLS[:count])) for count in (1, 2)
        )
    except ModelError:
        one_call = two_calls = ""

    if _NAMES[0] not in one_call:
        return _BARE if parser.name == "json" else None

    pieces = _pieces(one_call, 1)
    if pieces is None or _CALLS[0].id in one_call:
        return None

    before_name, before_arguments, after = pieces
    pair = _pieces(two_calls, 2)
    between = None
    if pair is not None and (pair[0], pair[1], pair[3], pair[4]) == (
        before_name,
        before_arguments,
        before_arguments,
        after,
    ):
        between = pair[2]

    return CallNotation(before_name.lstrip(), before_arguments, between, after.rstrip())


def _pieces(text: str, count: int) -> list[str] | None:
    """The texts before, between and after the names and arguments of that many calls."""
    pieces: list[str] = []
    for name in _NAMES[:count]:
        before, found_name, rest = text.partition(name)
        arguments = _ARGUMENTS.search(rest)
        if not found_name or arguments is None or _NAMES[0] in rest[: arguments.start()]:
            return None
        pieces += [before, rest[: arguments.start()]]
        text = rest[arguments.end() :]

    return [*pieces, text]
