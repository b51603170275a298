"""One attempt of an agent that asks through the real gateway, and a model that follows a script."""

from __future__ import annotations

import asyncio
from typing import Any

from chat_templates import HERMES, tokenizer_with

from agentevo.agents import Policy
from agentevo.agents.agent import FunctionAgent
from agentevo.agents.gateway.gateway import Gateway
from agentevo.config.gateway import GatewaySection
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Outcome, SamplingParams, Task


def call(name: str, arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play_through_gateway(
    scripted_engine: Any, player: Any, task: Task, says: Any, *, within_s: float = 300.0
) -> tuple[Outcome, Conversation]:
    """What the player's attempt is worth, and what was recorded. Raises what it raises."""
    tokenizer = tokenizer_with(HERMES)
    chat = ChatFormat(tokenizer)
    engine = scripted_engine(tokenizer, chat.end_of_turn_id, says)
    settings = {"name": "a", "seed": 5, "context_length": 10_000, "timeout_s": 300.0}
    conversation = Conversation(engine, chat, SamplingParams(max_new_tokens=200), **settings)

    async def attempt() -> Outcome:
        policy = Policy(conversation, gateway)
        try:
            async with asyncio.timeout(within_s):
                return await FunctionAgent(player.run).run(task, policy)
        finally:
            await policy.close()

    gateway = Gateway(GatewaySection(), model="tiny", timeout_s=300.0)
    try:
        return asyncio.run(attempt()), conversation
    finally:
        gateway.close()
