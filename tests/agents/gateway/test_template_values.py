"""`chat_template_kwargs` and the reasoning effort of a request are values of the template's
variables."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import SWITCHES

from agentevo.types import Message

TEMPLATE = SWITCHES
USER = {"role": "user", "content": "left or right ?"}
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def talk(gateway_of, says, *bodies, path="/chat/completions"):
    """The answers to the bodies, and the attempt's policy."""

    async def work():
        async with gateway_of(says) as opened:
            policy = opened.policy(context_length=2048)
            return [await opened.post(policy, body, path) for body in bodies], policy

    return asyncio.run(work())


def text_of(chat, policy, turn):
    return chat.tokenizer.decode(policy.conversation.prompt_ids(turn))


def test_a_conversation_with_values_goes_on_token_by_token(gateway_of, chat):
    body = {"max_tokens": 20, "chat_template_kwargs": {"enable_thinking": False}}
    said = {"role": "assistant", "content": "left"}
    answers, policy = talk(
        gateway_of,
        ["left", "right", "left"],
        body | {"messages": [USER]},
        body | {"messages": [USER, said, USER]},
        {"messages": [USER, said, USER]},
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [turn.parent for turn in policy.turns] == [None, 0, None]
    first = policy.turns[0]
    ids = policy.conversation.prompt_ids(1)
    known = [*first.prompt_ids, *first.completion_ids]
    assert ids[: len(known)] == known
    assert text_of(chat, policy, 1).count(CLOSED) == 2
    assert "<think>\n\n</think>\n\n" not in text_of(chat, policy, 2).rpartition("assistant")[2]
    assert policy.conversation.drift.counts == {"template_changed": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_a_value_opens_is_reasoning(gateway_of, chat, stream):
    values = {"opens": True, "enable_thinking": True}
    body = {"messages": [USER], "chat_template_kwargs": values, "max_tokens": 60, "stream": stream}
    (answer,), policy = talk(gateway_of, ["so</think>left"], body)
    assert answer.status_code == 200, answer.text
    assert policy.conversation.opening(policy.turns[0]) == "<think>\n"
    if not stream:
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "left")
    else:
        assert "</think>" not in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [USER], "reasoning_effort": "high"}),
        ("/responses", {"input": "left or right ?", "reasoning": {"effort": "high"}}),
        (
            "/chat/completions",
            {
                "messages": [USER],
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "high"},
            },
        ),
        (
            "/responses",
            {"input": "left or right ?", "chat_template_kwargs": {"reasoning_effort": "high"}},
        ),
    ],
)
def test_the_reasoning_effort_is_a_variable(gateway_of, chat, path, body):
    (answer,), policy = talk(gateway_of, ["left"], body, path=path)
    assert answer.status_code == 200, answer.text
    assert text_of(chat, policy, 0).startswith("<|im_start|>system\nEffort: high<|im_end|>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_thinkin": 1}, "did you mean 'enable_thinking'? It reads enable_thinking, opens"),
        ({"messages": []}, "'messages' is set by AgentEvo"),
        ({"bos_token": "x"}, "'bos_token' is set by AgentEvo"),
        ([1], "chat_template_kwargs is [1]"),
        ({"reasoning_effort": "x" * 10**6}, "at most 50,000 are allowed"),
    ],
)
def test_other_values_are_refused(gateway_of, values, message):
    (answer,), policy = talk(
        gateway_of, ["left"], {"messages": [USER], "chat_template_kwargs": values}
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert policy.turns == []


def test_the_size_of_a_prompt_is_counted_with_the_values(gateway_of):
    async def work():
        async with gateway_of(["left"]) as opened:
            conversation = opened.policy(context_length=2048).conversation
            messages = [Message("user", "x")]
            plain = await conversation.count_tokens(messages)
            return await conversation.count_tokens(messages, template={"opens": True}) - plain

    assert asyncio.run(work()) > 0
