"""What begins as a tool call and is none: the agent sees it, and the step's metrics count it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from chat_templates import HERMES

TEMPLATE = HERMES

CUT = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "1 + 1 ?"}], "tools": [TOOL]}


def of_a_client(text):
    """The message that a client keeps of a stream."""
    calls = {}
    content = ""
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    kept = calls.setdefault(call["index"], {"type": "function", "function": {}})
                    kept |= {"id": call["id"]} if "id" in call else {}
                    for key, piece in call["function"].items():
                        kept["function"][key] = kept["function"].get(key, "") + piece
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values())}


@pytest.mark.parametrize("api", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.parametrize("whole_calls", [False, True])
def test_a_call_that_is_none_may_be_held_back(gateway_of, api, whole_calls):
    function = TOOL["function"]
    tools = {
        "/chat/completions": [TOOL],
        "/responses": [{"type": "function", **function}],
        "/messages": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    body = {"model": "m", "tools": tools[api], "stream": True}
    body |= {"input": "?"} if api == "/responses" else {"messages": BODY["messages"]}
    limit = "max_output_tokens" if api == "/responses" else "max_tokens"

    async def talk():
        async with gateway_of([f"{CUT}\n{WHOLE}"], whole_calls=whole_calls) as opened:
            policy = opened.policy(context_length=4096)
            return (await opened.post(policy, {**body, limit: 500}, api)).text

    text = asyncio.run(talk())
    begun = {
        "/chat/completions": r'"id":"call_',
        "/responses": r'"type":"response.output_item.added"[^\n]*"function_call"',
        "/messages": r'"type":"tool_use"',
    }
    assert len(re.findall(begun[api], text)) == (1 if whole_calls else 2)


def test_a_history_goes_on_where_broken_calls_are_held_back(gateway_of):
    async def talk():
        async with gateway_of([f"{CUT}\n{WHOLE}", "2"], whole_calls=True) as opened:
            policy = opened.policy(context_length=4096)
            body = {**BODY, "max_tokens": 500}
            said = of_a_client((await opened.post(policy, {**body, "stream": True})).text)
            (call,) = said["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 1}

            result = {"role": "tool", "content": "1", "tool_call_id": call["id"]}
            messages = [*BODY["messages"], said, result]
            await opened.post(policy, {**body, "messages": messages})
            return policy

    policy = asyncio.run(talk())
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert policy.conversation.drift.counts == {}


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
