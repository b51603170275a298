"""What begins as a tool call and is none: the agent sees it, and the step's metrics count it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from chat_templates import HERMES, tokenizer_with

from agentevo.models.chat import ChatFormat

CUT = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "1 + 1 ?"}], "tools": [TOOL]}


@pytest.fixture(scope="module")
def loaded():
    return SimpleNamespace(tokenizer=tokenizer_with(HERMES))


@pytest.fixture(scope="module")
def chat(loaded):
    return ChatFormat(loaded.tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content_and_is_counted(gateway_of, stream):
    async def talk():
        async with gateway_of([CUT, WHOLE]) as opened:
            policy = opened.policy(context_length=4096)
            body = {**BODY, "stream": stream, "max_tokens": 500}
            first = await opened.post(policy, body)
            counted = policy.conversation.metrics()
            await opened.post(policy, body)
            return first.text, counted, policy.conversation

    text, counted, conversation = asyncio.run(talk())
    assert "<tool_call>" in text
    assert counted == conversation.metrics() == {"num_malformed_calls": 1.0}

    conversation.discard(0)  # nobody received it
    assert conversation.metrics() == {"num_undelivered": 1.0}
