"""Legacy completions: prompts without a chat, recorded token for token like other turns."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai import AsyncOpenAI

from agentevo.types import context_of

PATH = "/completions"


def events_of(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def talk(gateway_of, says, *bodies):
    """The answers to each body, the turns, and the prompts that the engine saw."""

    async def ask():
        async with gateway_of(says) as opened:
            policy = opened.policy()
            answers = [await opened.post(policy, body, PATH) for body in bodies]
            seen = [ids for ids, *_ in opened.engine.requests]
            return answers, policy.conversation.turns, seen

    return asyncio.run(ask())


def test_a_text_goes_to_the_engine_as_it_is(gateway_of, chat):
    (answer,), turns, seen = talk(
        gateway_of, ["left"], {"prompt": "right ?", "return_token_ids": True, "logprobs": 0}
    )
    body = answer.json()
    assert body.get("object") == "text_completion", body

    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("left", "stop")
    assert seen == [chat.plain("right ?")] == [choice["prompt_token_ids"]]
    assert choice["token_ids"] == list(turns[0].completion_ids)
    assert choice["logprobs"]["token_logprobs"] == list(turns[0].logprobs)
    assert "".join(choice["logprobs"]["tokens"][:-1]) == "left"
    assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]
    assert turns[0].overrides is None and turns[0].parent is None

    usage = body["usage"]
    assert usage["prompt_tokens"] == len(seen[0])
    assert usage["completion_tokens"] == len(turns[0].completion_ids)


def test_a_text_that_goes_on_keeps_the_drawn_ids(gateway_of, chat):
    """With the token that ended the turn it extends it; without, the ids before it stay."""
    end = chat.tokenizer.decode([chat.end_of_turn_id])
    first = "right ?"
    more = " right ?"
    _, turns, seen = talk(
        gateway_of,
        ["left", "right", "left", "left"],
        {"prompt": first},
        {"prompt": first + "left" + end + more},
        {"prompt": first + "left" + more},
        {"prompt": [*chat.plain(first), *chat.plain("left"), chat.end_of_turn_id, 5]},
    )
    drawn = list(turns[0].completion_ids)

    assert [turn.parent for turn in turns] == [None, 0, None, 0]
    assert seen[1] == seen[0] + drawn + chat.plain(more)
    assert seen[2] == seen[0] + drawn[:-1] + chat.plain(more)
    assert list(turns[3].prompt_ids) == [5]
    assert [context_of(turns, turn.index) for turn in turns] == seen


@pytest.mark.slow
def test_several_prompts_with_several_answers_each(gateway_of, chat):
    prompts = [chat.plain("left"), chat.plain("right ?")]
    for stream in (False, True):
        (answer,), turns, _ = talk(
            gateway_of,
            ["left", "right", "right", "left"],
            {"prompt": prompts, "n": 2, "echo": True, "stream": stream}
            | ({"stream_options": {"include_usage": True}} if stream else {}),
        )
        bodies = events_of(answer.text) if stream else [answer.json()]
        texts = ["", "", "", ""]
        for body in bodies:
            for choice in body["choices"]:
                texts[choice["index"]] += choice["text"]

        assert texts == ["leftleft", "leftright", "right ?right", "right ?left"]
        assert bodies[-1]["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert len(turns) == 4


def test_of_several_prompts_all_are_answered_or_none_is_kept(gateway_of, chat):
    async def ask():
        async with gateway_of(["left"] * 3) as opened:
            policy = opened.policy()
            answer = await opened.post(policy, {"prompt": ["left", "right " * 400]}, PATH)
            return answer, policy.conversation.received

    answer, received = asyncio.run(ask())
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert received == []


@pytest.mark.slow
def test_the_clients_own_package_reads_it_streamed_and_whole(gateway_of):
    async def ask():
        async with gateway_of(["left right", "left right"]) as opened:
            policy = opened.policy()
            async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
                asked = {"model": "m", "prompt": "right ?", "stop": ["right"], "max_tokens": 9}
                whole = await client.completions.create(**asked)
                stream = await client.completions.create(**asked, stream=True)
                parts = [part async for part in stream]
                return whole.choices[0], parts

    whole, parts = asyncio.run(ask())
    assert whole.text == "left " == "".join(part.choices[0].text for part in parts)
    assert whole.finish_reason == parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "prompt is None"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt is"),
        ({"prompt": [[]]}, "prompt is"),
        ({"prompt": ["left", 3]}, "prompt is"),
        ({"prompt": [True]}, "prompt is"),
        ({"prompt": [10**6]}, "token 0"),
        ({"prompt": ["left"] * 300}, "at most 256"),
        ({"prompt": "left", "suffix": "x"}, "suffix"),
        ({"prompt": "left", "best_of": 3}, "best_of"),
        ({"prompt": "left", "echo": True, "logprobs": 0}, "while the policy is trained"),
        ({"prompt": "left", "echo": True, "logprobs": 2}, "set logprobs to 0 or 1"),
        ({"prompt": "left", "echo": True, "logprobs": 0, "stream": True}, "stream to false"),
        ({"prompt": "left", "max_tokens": 0}, "max_new_tokens"),
        ({"prompt": "left", "logprobs": True}, "whole number"),
        ({"prompt": "left", "logprobs": 21}, "0 to 20"),
        ({"prompt": "left", "messages": []}, "messages"),
        ({"prompt": ["left"] * 200, "n": 6}, "n is 1200"),
    ],
)
def test_what_can_not_be_asked_is_a_400_that_says_why(wrong, why, gateway_of):
    (answer,), turns, _ = talk(gateway_of, ["left"] * 9, wrong)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert not turns
