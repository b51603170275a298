"""Calls of tools in a stream: their arguments come in pieces whose sum is the arguments of the
whole answer, in every notation, through every API, however the tokens come."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from chat_templates import HERMES
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import WHOLE, texts

from agentevo.agents.gateway import anthropic_messages, chat_completions, responses
from agentevo.agents.gateway.answer import AnswerInProgress
from agentevo.agents.gateway.images import DecodedImages, RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.request import PromptSize
from agentevo.models.tool_calls import parser_named, parser_names
from agentevo.types import Message, Turn
from examples import examples

TEMPLATE = HERMES

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
BODIES = (
    {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "function": TOOL}],
    },
    {"input": "q", "tools": [{"type": "function", **TOOL}]},
    {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "max_tokens": 9,
    },
)
APIS = (chat_completions.API, responses.API, anthropic_messages.API)


class Letters:
    """A text stream whose tokens are texts."""

    def __init__(self):
        self.said = ""

    def add(self, text):
        self.said += text
        return text

    def finish(self, whole):
        return whole.removeprefix(self.said)


def answered(name, text, cuts, request):
    """The pieces that come before the end, and with it, and the reply."""
    chat = SimpleNamespace(text_stream=lambda stops: Letters(), parser=parser_named(name))
    answer = AnswerInProgress(request, chat, "")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = []
    for begin, end in pairwise(places):
        pieces.append(answer.add(text[begin:end]))

    said = Message("assistant", text)
    turn = Turn(
        index=0,
        prompt_ids=[],
        completion_ids=[],
        logprobs=[],
        versions=[],
        finish_reason="stop",
        messages=[said],
    )
    pieces.append(answer.finish(turn))

    return pieces, answer.reply(turn, PromptSize(), [])


def told_in_chat(events):
    calls = {}
    texts = []
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        texts.append(delta.get("content") or "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"arguments": [], "deltas": 0})
            known |= {key: call[key] for key in ("id",) if key in call}
            known["arguments"].append(call["function"]["arguments"])

    assert list(calls) == list(range(len(calls)))
    return ["".join(call["arguments"]) for call in calls.values()], "".join(texts)


def told_in_responses(events):
    calls = {}
    texts = []
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            calls[event["output_index"]].append(event["delta"])
        if event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == "".join(calls[event["output_index"]])
        if event["type"] == "response.output_item.added":
            calls |= {event["output_index"]: []} if "call_id" in event["item"] else {}
        if event["type"] == "response.output_text.delta":
            texts.append(event["delta"])

    return ["".join(pieces) for pieces in calls.values()], "".join(texts)


def told_in_messages(events):
    calls = {}
    texts = []
    opened = set()
    for event in events:
        if event["type"] == "content_block_start":
            assert not opened, "one block after the other"
            opened.add(event["index"])
            if event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = []

        if event["type"] == "content_block_stop":
            opened.remove(event["index"])

        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                calls[event["index"]].append(delta["partial_json"])
            texts.append(delta.get("text", ""))

    assert not opened
    return ["".join(pieces) for pieces in calls.values()], "".join(texts)


TOLD = (told_in_chat, told_in_responses, told_in_messages)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_the_pieces_of_a_call_are_its_arguments_and_a_broken_one_is_no_json(data):
    name = data.draw(st.sampled_from(parser_names()))
    text = data.draw(texts(name))
    cuts = data.draw(st.lists(st.integers(0, 500), max_size=30))
    for api, body, told_in in zip(APIS, BODIES, TOLD, strict=True):
        request = api.request_of(body, Memory(), RequestImages(DecodedImages()))
        pieces, reply = answered(name, text, cuts, request)
        _, whole = answered(name, text, [], request)
        assert (reply.content, reply.reasoning) == (whole.content, whole.reasoning)

        stream = api.stream(request)
        events = stream.begin(PromptSize())
        events += [event for some in pieces for event in stream.pieces(0, some)]
        told, content = told_in(events + stream.end([reply]))
        called = [call.arguments for call in whole.tool_calls]
        assert [arguments for arguments in told if is_json(arguments)] == called
        assert content == whole.content


@pytest.mark.parametrize("name", sorted(set(WHOLE) - {"json", "pythonic"}))
def test_arguments_come_while_they_are_written(name):
    """Letter by letter: something is told before the call is whole."""
    text = WHOLE[name]
    request = chat_completions.API.request_of(BODIES[0], Memory(), RequestImages(DecodedImages()))
    pieces, reply = answered(name, text, range(len(text)), request)
    stream = chat_completions.API.stream(request)
    events = [stream.pieces(0, some) for some in pieces]
    numbers = [number for number, some in enumerate(events) if some]
    assert reply.tool_calls and len(numbers) > 2
    assert numbers[0] < len(text) - 4


BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": 1} x}\n</tool_call>'


@pytest.mark.parametrize("says", [WHOLE["hermes"].strip(), BROKEN], ids=["whole", "broken"])
def test_what_a_stream_told_is_its_turn_again_when_it_comes_back(gateway_of, says):
    """Also with a call that broke after it had begun."""
    body = BODIES[0] | {"max_tokens": 200}

    async def talk():
        async with gateway_of([says, "left"]) as opened:
            policy = opened.policy(context_length=4096)
            answer = await opened.post(policy, body | {"stream": True})
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if "{" in line]
            parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert len(parts) > 1

            call = {
                "id": parts[0]["id"],
                "type": "function",
                "function": {
                    "name": parts[0]["function"]["name"],
                    "arguments": "".join(part["function"]["arguments"] for part in parts),
                },
            }
            content = "".join(delta.get("content") or "" for delta in deltas)
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "content": "no", "tool_call_id": call["id"]}
            more = body | {"messages": [*body["messages"], said, result]}
            second = await opened.post(policy, more)
            assert second.status_code == 200, second.text
            return call, policy.turns

    call, turns = asyncio.run(talk())
    assert [turn.parent for turn in turns] == [None, 0]
    assert is_json(call["function"]["arguments"]) == (says != BROKEN)
