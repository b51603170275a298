"""The formats of tools, calls and results: they decide how the policy reads tools and results, and
how its calls are parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from agentevo.agents.policy import Policy, Reply
from agentevo.agents.single_turn import with_system
from agentevo.agents.tools.tool import ToolResult
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.tool_calls import MalformedCall
from agentevo.types import Message, ToolCall
from agentevo.types.content import Content, content_of, parts_of

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ParsedReply:
    reply: Reply
    message: Message
    """The reply as a message of the history."""
    calls: Sequence[ToolCall]
    malformed: Sequence[MalformedCall]
    num_tokens: int
    """The number of sampled tokens."""


class ToolFormat(Protocol):
    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None: ...

    tools: Tools
    """The tools' schemas in each request; empty if they are in the text."""

    def opening(self, messages: list[Message]) -> list[Message]:
        """The conversation before the first reply."""
        ...

    async def ask(self, messages: Sequence[Message], form: AnswerForm | None) -> ParsedReply:
        """The policy's reply to the conversation, in the required form. Raises the errors of
        Policy.generate."""
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
        return messages

    async def ask(self, messages: Sequence[Message], form: AnswerForm | None) -> ParsedReply:
        reply = await self._policy.generate(list(messages), tools=self.tools, form=form)
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
        answered = [
            Message("tool", _content(self._policy, result), tool_call_id=call.id, name=call.name)
            for call, result in zip(parsed.calls, results, strict=True)
        ]
        problems = [
            f"Error: failed to decode the tool call: {call.problem}" for call in parsed.malformed
        ]
        # These results belong to no parsed call.
        return answered + [Message("user", problem) for problem in problems]


def _content(policy: Policy, result: ToolResult, before: str = "", after: str = "") -> Content:
    """What the policy reads of a result, between two texts: with the images if it sees images."""
    if not result.parts or not policy.sees_images:
        return f"{before}{result.text}{after}"

    parts = [part if isinstance(part, str) else policy.add_image(part) for part in result.parts]
    return content_of([before, *parts, after])


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


STOP = "\nObservation:"
"""The stop string of a reply, so that the policy does not write the observation."""
_ACTION = re.compile(r"^Action:[ \t]*(?P<name>[^\n]*)$", re.MULTILINE)
_INPUT = re.compile(r"\s*^Action Input:(?P<text>.*)\Z", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_RULES = """You may use these tools, each given by its JSON schema:
{tools}

Use this form:
Thought: what to do next
Action: the name of one tool
Action Input: its arguments, as a JSON object
Observation: what the tool gave (you are told it; never write it yourself)
... (these lines may come again)
Thought: I know the answer
Final Answer: the answer"""


class ReActFormat:
    """ReAct (Yao et al. 2022, arXiv 2210.03629): thoughts, actions and observations as plain text,
    for models whose chat template does not support tools.

        Thought: I need the sum.
        Action: add
        Action Input: {"a": 1, "b": 2}
                                            Observation: 3
        Thought: That is it.
        Final Answer: 3

    A reply has one action and ends where an observation would begin. A reply without an action is
    the final answer."""

    tools: Tools = None

    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._policy = policy
        self._schemas = schemas

    def opening(self, messages: list[Message]) -> list[Message]:
        """See ToolFormat.opening. The rules are at the end of the system message."""
        return with_system(messages, _RULES.format(tools=tools_as_text(self._schemas)))

    async def ask(self, messages: Sequence[Message], form: AnswerForm | None) -> ParsedReply:
        reply = await self._policy.generate(list(messages), stop=STOP, form=form)
        calls, malformed = read_action(reply.answer)
        _, drawn = self._policy.num_tokens(reply.turn)
        return ParsedReply(reply, reply.message, calls, malformed, drawn)

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        observations = [_content(self._policy, result, "Observation: ") for result in results]
        problems = [f"Observation: Error: {call.problem}" for call in parsed.malformed]
        return [Message("user", content) for content in (*observations, *problems)]


def read_action(text: str) -> tuple[list[ToolCall], list[MalformedCall]]:
    """The action of a reply as a call, or as a malformed call. A final answer has neither. Text
    after `Final Answer:` is not an action."""
    text = text.split(STOP, 1)[0]
    action = _ACTION.search(text)
    final = text.find("Final Answer:")
    if action is None or 0 <= final < action.start():
        return [], []

    name = action["name"].strip()
    input_match = _INPUT.match(text, action.end())
    if input_match is None:
        problem = "an action needs a line `Action Input:` with a JSON object behind it"
        return [], [MalformedCall(text[action.start() :], problem, name)]

    arguments = input_match["text"].split("\nFinal Answer:")[0].strip()
    fenced = _FENCE.match(arguments)
    return [ToolCall(name, fenced[1] if fenced else arguments or "{}")], []


SEARCH_STOP = "</search>"
SEARCH_RULES = """Answer the question. You may search as often as you like: write \
<search>a query</search>, and you are told what was found between <information> and \
</information>. Think between <think> and </think> whenever you learn something new. When you know \
the answer, write it as <answer>...</answer>."""
_QUERY = re.compile(r"<search>(.*?)(?:</search>|\Z)", re.DOTALL)


class SearchTags:
    """Search-R1's format of searches (Jin et al. 2025, arXiv 2503.09516): queries and results as
    tags in plain text.

        <think>I need the capital.</think><search>capital of Australia</search>
                                            <information>[1] Canberra ...</information>
        <answer>Canberra</answer>

    A query calls the first tool with its first parameter, and ends the reply. The results are in a
    user message, which is never trained on."""

    tools: Tools = None

    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._policy = policy
        function = schemas[0]["function"]
        self._name = function["name"]
        self._parameter = next(iter(function["parameters"].get("properties") or {"query": {}}))

    def opening(self, messages: list[Message]) -> list[Message]:
        """See ToolFormat.opening. The rules come before the question, as in the paper."""
        if messages[0].role == "system":
            return messages
        question = content_of([f"{SEARCH_RULES}\n\nQuestion: ", *parts_of(messages[0])])
        return [Message("user", question), *messages[1:]]

    async def ask(self, messages: Sequence[Message], form: AnswerForm | None) -> ParsedReply:
        reply = await self._policy.generate(list(messages), stop=SEARCH_STOP, form=form)
        _, num_tokens = self._policy.num_tokens(reply.turn)

        query = _QUERY.search(reply.answer)
        has_answered = "<answer>" in reply.answer[: query.start() if query else None]
        calls = []
        if query is not None and not has_answered:
            calls = [ToolCall(self._name, json.dumps({self._parameter: query[1].strip()}))]
        return ParsedReply(reply, reply.message, calls, [], num_tokens)

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        return [
            Message("user", _content(self._policy, result, "<information>", "</information>"))
            for result in results
        ]
