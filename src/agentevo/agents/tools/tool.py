"""The tool contract: toolsets, their sessions, and the results and errors of calls.

An entry of `agent.tools` becomes a toolset, one object per process. The toolset opens a session for
each attempt. The session holds the state that its tools share and closes with the attempt.

A call can raise:

    ToolArgumentsError wrong arguments: the policy reads the message
    ToolError              the tool's own refusal, which the policy also reads
    ToolUnavailableError   the tool can't be reached; retried if nothing was sent, or if equal
                           calls change nothing
    anything else          a bug in the tool's code: the policy reads that it failed, and the
                           user sees the traceback
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

import msgspec

from agentevo.types import Task, ToolCall
from agentevo.types.images import ImageFile

_SCHEMA_KEYS = ("type", "properties", "required", "additionalProperties")


def ordered_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object, with its keys in an order that MCP preserves: a policy reads the
    same tokens of a tool wherever the tool runs."""
    first = {key: schema[key] for key in _SCHEMA_KEYS if key in schema}
    return first | {key: value for key, value in schema.items() if key not in first}


def object_schema(schema: Any) -> dict[str, Any]:
    """A tool's schema in the form that chat templates and parsers read: an object whose properties
    are schemas. Any other schema is replaced by that of an object without properties."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    required = schema.get("required", []) if isinstance(schema, dict) else None
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or schema.get("type", "object") != "object"
        or not isinstance(schema.get("$schema", ""), str)
        or not all(
            isinstance(property_schema, (dict, bool)) for property_schema in properties.values()
        )
        or not all(isinstance(name, str) for name in required)
    ):
        return {"type": "object", "properties": {}}

    return ordered_schema({**schema, "type": "object", "properties": properties})


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tool, as the policy sees it."""

    name: str
    """The name within its toolset."""
    description: str = ""
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    cacheable: bool = False
    """Whether equal calls have equal results and change nothing."""
    changes_nothing: bool | None = None
    """What the server says about changes (MCP's readOnlyHint). None if it says nothing."""
    is_destructive: bool = False
    """Whether the server says that calls may delete or overwrite something (MCP's
    destructiveHint)."""
    full_name: str = ""
    """SERVER.TOOL, if several servers are behind one toolset. `include` and calls accept this name
    too."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tool."""
        return (self.name, self.full_name) if self.full_name else (self.name,)

    def schema(self, name: str) -> dict[str, Any]:
        """The schema in OpenAI's form, under the name that the policy knows."""
        function = {"name": name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    text: str = ""
    """What the policy reads. With `parts`, what a policy reads that can't see images."""
    is_error: bool = False
    """Whether the call failed; `text` then has the reason."""
    reward: float = 0.0
    """The reward of the turn that made the call."""
    parts: Sequence[Any] = ()
    """The texts and images of the result, in their order, if it has an image. A tool may give each
    image in any form of data/images.py; AgentEvo then reads it, and writes `text`."""

    @property
    def images(self) -> list[ImageFile]:
        """The images, after AgentEvo has read them."""
        return [part for part in self.parts if isinstance(part, ImageFile)]

    @property
    def size(self) -> int:
        """The characters of the text and the bytes of the images."""
        return len(self.text) + sum(len(image.data) for image in self.images)

    def with_text(self, text: str) -> ToolResult:
        """The result with another text. Its images stay in their places if the text only got a
        beginning, and follow the text otherwise."""
        if text == self.text:
            return self

        parts: tuple[Any, ...] = ()
        if self.parts and text.endswith(self.text):
            parts = (text.removesuffix(self.text), *self.parts)
        elif self.parts:
            parts = (text, *self.images)
        return msgspec.structs.replace(self, text=text, parts=parts)


class Condensed(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the policy reads in place of a long result."""

    text: str
    problem: str = ""
    """Why the text is not a summary, or not a summary of the whole result."""


class Condense(Protocol):
    """Makes long results shorter."""

    async def __call__(self, spec: ToolSpec, call: ToolCall, text: str) -> Condensed | None:
        """The replacement for the result `text` of a call. None to leave the result unchanged."""
        ...


class ToolSession(Protocol):
    """The tools of one attempt. Calls may overlap."""

    specs: Sequence[ToolSpec]
    """The tools; their names are distinct."""
    instructions: str = ""
    """The text about these tools that the policy reads before the task."""
    num_losses: int = 0
    """How often the state of the calls was lost, for example by a restart of the server. The later
    state does not include the effects of the earlier calls."""

    async def prepare(self) -> None:
        """Makes sure that a call can be made. This does not count towards the call's time limit.
        Raises ToolUnavailableError."""
        return

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls one of `specs`. See the module for what it raises."""
        ...

    async def outcome(self) -> Any:
        """The attempt's outcome by its final state, in a form that an agent function can return
        (agents/agent.py); None if the tools give none. Called once, after the attempt."""
        return None


@runtime_checkable
class Offering(Protocol):
    """A session of a server that has prompts and resources."""

    async def offers(self) -> tuple[Sequence[str], Sequence[str]]:
        """A line for each prompt and each resource. Raises ToolUnavailableError."""
        ...


class Toolset(Protocol):
    """See the module."""

    name: str
    """Distinguishes its tools from others of the same name."""

    @property
    def has_outcome(self) -> bool:
        """Whether its sessions give the outcome of an attempt."""
        return False

    def session(self, task: Task, seed: int) -> AbstractAsyncContextManager[ToolSession]:
        """The tools for one attempt at `task`; `seed` is the attempt's seed, which a replay
        repeats. Raises ToolUnavailableError if the tools can't be reached."""
        ...

    async def close(self) -> None:
        """Ends everything that attempts share."""
        return


HEAD = 0.7
"""The head's share of the kept characters."""


def shorten_text(text: str, longest: int) -> str:
    """The text, or at most `longest` characters of it and a line about the omission. Halves of
    surrogate pairs, which no tokenizer accepts, become question marks."""
    if len(text) <= longest:
        return text if text.isascii() else text.encode("utf-8", "replace").decode()
    head = int(longest * HEAD)
    tail = longest - head
    left_out = len(text) - longest
    notice = f"\n[{left_out:,} characters are left out here]\n"
    return f"{text[:head]}{notice}{text[-tail:]}".encode("utf-8", "replace").decode()
