"""The formats of tools, calls and results: they decide how the policy reads tools and results, and
how its calls are parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from agentevo.agents.policy import Policy, Reply
from agentevo.agents.tools.tool import ToolResult
from agentevo.models.tool_calls import MalformedCall
from agentevo.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ParsedReply:
    """A parsed reply of the policy."""

    reply: Reply
    message: Message
    """The reply as a message of the history."""
    calls: Sequence[ToolCall]
    malformed: Sequence[MalformedCall]
    num_tokens: int
    """The number of sampled tokens."""


class ToolFormat(Protocol):
    """The format of one attempt."""

    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None: ...

    tools: Tools
    """The tools' schemas in each request; empty if they are in the text."""

    def opening(self, messages: list[Message]) -> list[Message]:
        """The conversation before the first reply."""
        ...

    async def ask(self, messages: Sequence[Message]) -> ParsedReply:
        """The policy's reply to the conversation. Raises the errors of Policy.generate."""
        ...

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        """The messages that the policy reads next: the results of its calls, in their order, and
        the problem of each malformed call."""
        ...


class NativeFormat:
    """Tools, calls and results as the model's chat template writes them."""

    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._policy = policy
        self.tools: Tools = list(schemas)

    def opening(self, messages: list[Message]) -> list[Message]:
        """See ToolFormat.opening."""
        return messages

    async def ask(self, messages: Sequence[Message]) -> ParsedReply:
        """See ToolFormat.ask."""
        reply = await self._policy.generate(list(messages), tools=self.tools)
        _, drawn = self._policy.num_tokens(reply.turn)
        if self._policy.remote_model is not None:
            message = _with_ids(reply)
            return ParsedReply(reply, message, message.tool_calls, (), drawn)

        conversation = self._policy.conversation
        parsed = conversation.chat.parser.parse(reply.text, opening=reply.opening, tools=self.tools)
        calls = tuple(
            ToolCall(call.name, call.arguments, _id_of(reply.turn, number))
            for number, call in enumerate(parsed.tool_calls)
        )
        content = parsed.content + "".join(call.text for call in parsed.malformed)
        message = Message("assistant", content, calls, reasoning=parsed.reasoning)
        conversation.recognise(reply.turn, message)

        return ParsedReply(reply, message, calls, parsed.malformed, drawn)

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        """See ToolFormat.answers."""
        answered = [
            Message("tool", result.text, tool_call_id=call.id, name=call.name)
            for call, result in zip(parsed.calls, results, strict=True)
        ]
        problems = [
            f"Error: failed to decode the tool call: {call.problem}" for call in parsed.malformed
        ]
        # These results belong to no parsed call.
        return answered + [Message("user", problem) for problem in problems]


def _with_ids(reply: Reply) -> Message:
    """A server's answer, with an id for each call, so that its result can refer to it."""
    calls = tuple(
        call if call.id else replace(call, id=_id_of(reply.turn, number))
        for number, call in enumerate(reply.message.tool_calls)
    )
    return replace(reply.message, tool_calls=calls)


def _id_of(turn: int, number: int) -> str:
    return f"c{turn % 10_000:04}{number % 10_000:04}"


def tools_as_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """A line for each tool, its schema as JSON, for models whose chat template does not support
    tools."""
    return "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
