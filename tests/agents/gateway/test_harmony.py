"""A model with GPT-OSS's template at the gateway: thoughts, calls and answers come apart, and what
comes back goes on from the drawn ids, whose end the template would write otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from harmony_template import HARMONY, MARKS

from agentevo.models.tiny_tokenizer import byte_tokenizer

THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
CALL = THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
FINAL = "<|channel|>final<|message|>left"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "left or right ?"}


@pytest.fixture
def loaded():
    tokenizer = byte_tokenizer(512)
    special = {"additional_special_tokens": list(MARKS), "eos_token": "<|return|>"}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = HARMONY
    return SimpleNamespace(tokenizer=tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_an_answer_are_one_line_of_turns(gateway_of, chat, stream):
    body = {"tools": [TOOL], "max_tokens": 400}

    async def talk():
        async with gateway_of([CALL, FINAL, FINAL]) as opened:
            policy = opened.policy(context_length=4096)
            first = await opened.post(policy, {**body, "messages": [USER]})
            called = first.json()["choices"][0]["message"]
            result = {"role": "tool", "content": "3", "tool_call_id": called["tool_calls"][0]["id"]}
            history = [USER, called, result]
            second = await opened.post(policy, {**body, "messages": history})
            answered = second.json()["choices"][0]["message"]
            more = {**body, "messages": [*history, answered, USER], "stream": stream}
            third = await opened.post(policy, more)
            assert third.status_code == 200, third.text
            return called, answered, policy

    called, answered, policy = asyncio.run(talk())
    assert (called["reasoning_content"], called["content"]) == ("so", None)
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (answered["content"], answered.get("reasoning_content")) == ("left", None)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]

    text = chat.tokenizer.decode(policy.conversation.prompt_ids(2))
    assert FINAL + "<|return|><|start|>user<|message|>left or right ?<|end|>" in text
    assert '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|>' in text


def test_ids_with_the_end_of_a_history_are_another_context(gateway_of, chat):
    """As of any ids that differ from the drawn ones: nothing is put in their place unseen."""
    end, drawn = chat.tokenizer.convert_tokens_to_ids(["<|end|>", "<|return|>"])

    async def talk():
        async with gateway_of([FINAL] * 3) as opened:
            policy = opened.policy(context_length=4096)
            await policy.generate([USER])
            turn = policy.turns[0]
            known = [*turn.prompt_ids, *turn.completion_ids]
            assert known[-1] == drawn

            more = chat.continuation([policy.turns[0].messages[0]], ended_with_stop=True)
            await policy.generate([*known, *more])
            await policy.generate([*known[:-1], end, *more])
            return policy.turns

    turns = asyncio.run(talk())
    assert [turn.parent for turn in turns] == [None, 0, None]
