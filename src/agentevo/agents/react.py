"""ReAct (Yao et al. 2022, arXiv 2210.03629): thoughts, actions and observations as plain text, for
models whose chat template does not support tools.

    Thought: I need the sum.
    Action: add
    Action Input: {"a": 1, "b": 2}
                                        Observation: 3
    Thought: That is it.
    Final Answer: 3

A reply has one action and ends where an observation would begin. A reply without an action is the
final answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.policy import Policy
from agentevo.agents.tool_format import ParsedReply, Tools, tools_as_text
from agentevo.agents.tools.tool import ToolResult
from agentevo.models.tool_calls import MalformedCall
from agentevo.types import Message, ToolCall

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
    """See the module, and ToolFormat."""

    def __init__(self, policy: Policy, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._policy = policy
        self._schemas = schemas
        self.tools: Tools = None

    def opening(self, messages: list[Message]) -> list[Message]:
        """See ToolFormat.opening. The rules are at the end of the system message."""
        rules = _RULES.format(tools=tools_as_text(self._schemas))
        if messages[0].role == "system":
            return [Message("system", f"{messages[0].text}\n\n{rules}"), *messages[1:]]
        return [Message("system", rules), *messages]

    async def ask(self, messages: Sequence[Message]) -> ParsedReply:
        """See ToolFormat.ask."""
        reply = await self._policy.generate(list(messages), stop=STOP)
        calls, malformed = read_action(reply.answer)
        _, drawn = self._policy.num_tokens(reply.turn)
        return ParsedReply(reply, reply.message, calls, malformed, drawn)

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        """See ToolFormat.answers."""
        texts = [result.text for result in results] + [
            f"Error: {call.problem}" for call in parsed.malformed
        ]
        return [Message("user", f"Observation: {text}") for text in texts]


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
