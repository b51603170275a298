"""Search-R1's format of searches (Jin et al. 2025, arXiv 2503.09516): queries and results as tags
in plain text.

    <think>I need the capital.</think><search>capital of Australia</search>
                                        <information>[1] Canberra ...</information>
    <answer>Canberra</answer>

The results are in a user message, which is never trained on. A reply ends after its query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.policy import Policy
from agentevo.agents.tool_format import ParsedReply, Tools
from agentevo.agents.tools.tool import ToolResult
from agentevo.types import Message, ToolCall

STOP = "</search>"
RULES = """Answer the question. You may search as often as you like: write \
<search>a query</search>, and you are told what was found between <information> and \
</information>. Think between <think> and </think> whenever you learn something new. When you know \
the answer, write it as <answer>...</answer>."""
_QUERY = re.compile(r"<search>(.*?)(?:</search>|\Z)", re.DOTALL)


class SearchTags:
    """The ToolFormat of Search-R1. A query calls the first tool with its first parameter."""

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
        first = messages[0]
        return [Message("user", f"{RULES}\n\nQuestion: {first.text}"), *messages[1:]]

    async def ask(self, messages: Sequence[Message]) -> ParsedReply:
        """See ToolFormat.ask."""
        reply = await self._policy.generate(list(messages), stop=STOP)
        _, num_tokens = self._policy.num_tokens(reply.turn)

        query = _QUERY.search(reply.answer)
        has_answered = "<answer>" in reply.answer[: query.start() if query else None]
        calls = []
        if query is not None and not has_answered:
            calls = [ToolCall(self._name, json.dumps({self._parameter: query[1].strip()}))]
        return ParsedReply(reply, reply.message, calls, [], num_tokens)

    def answers(self, parsed: ParsedReply, results: Sequence[ToolResult]) -> list[Message]:
        """See ToolFormat.answers."""
        return [Message("user", f"<information>{result.text}</information>") for result in results]
