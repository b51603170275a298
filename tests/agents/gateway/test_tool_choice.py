"""`tool_choice` none: the tools stay in the prompt, so the history goes on, and nothing is read as
a call."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import HERMES

from agentevo.models.chat.answer_form import AnswerForm, grammar_of

TEMPLATE = HERMES

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
QUESTION = {"role": "user", "content": "1 + 1 = ?"}


def in_chat(answer=None):
    """The body of a request, the first or the one after an answer; its path."""
    function = {"name": "add", "parameters": PARAMETERS}
    messages = [QUESTION]
    if answer is not None:
        said = answer["choices"][0]["message"]
        result = {"role": "tool", "content": "2", "tool_call_id": said["tool_calls"][0]["id"]}
        messages += [said, result]
    return "/chat/completions", {
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        **({} if answer is None else {"tool_choice": "none", "parallel_tool_calls": False}),
    }


def in_responses(answer=None):
    items = [QUESTION]
    if answer is not None:
        (call,) = answer["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        items += [call, result]
    return "/responses", {
        "input": items,
        "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
        **({} if answer is None else {"tool_choice": "none"}),
    }


def in_messages(answer=None):
    messages = [QUESTION]
    if answer is not None:
        said = answer["content"]
        result = {"type": "tool_result", "tool_use_id": said[0]["id"], "content": "2"}
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result]},
        ]
    return "/messages", {
        "messages": messages,
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": PARAMETERS}],
        **({} if answer is None else {"tool_choice": {"type": "none"}}),
    }


TEXTS = {
    in_chat: lambda answer: answer["choices"][0]["message"]["content"],
    in_responses: lambda answer: answer["output"][0]["content"][0]["text"],
    in_messages: lambda answer: answer["content"][0]["text"],
}


@pytest.mark.parametrize("api", list(TEXTS))
def test_a_last_step_without_calls_extends_the_history(gateway_of, api):
    async def talk():
        async with gateway_of([CALL, CALL]) as opened:
            policy = opened.policy(context_length=10_000)
            path, body = api()
            first = (await opened.post(policy, body, path)).json()
            path, body = api(first)
            return (await opened.post(policy, body, path)).json(), policy

    answer, policy = asyncio.run(talk())
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert TEXTS[api](answer) == CALL, "a text, in the model's own words"
    assert policy.conversation.metrics() == {}


@pytest.mark.parametrize("strict", [True, False])
def test_no_call_is_in_the_grammar(chat, strict):
    function = {"name": "add", "parameters": PARAMETERS, "strict": strict}
    tools = [{"type": "function", "function": function}]
    assert grammar_of(AnswerForm(calls="none"), chat, tools, "q") == ""

    schema = AnswerForm(schema={"type": "integer"}, calls="none")
    assert grammar_of(schema, chat, tools, "q") == grammar_of(
        AnswerForm(schema={"type": "integer"}), chat, None, "q"
    )
