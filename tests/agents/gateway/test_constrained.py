"""Answers in a given form through each API of the gateway: drawn under a grammar, recorded with it,
and trained as they were drawn."""

from __future__ import annotations

import asyncio
import copy
import json
import sys

import pytest
from constrained import policy_of, tiny_policy

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.grammar import Grammars
from agentevo.training.trainer import Trainer
from agentevo.types import Trajectory

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOLS = {"add": SCHEMA, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
ASK = [{"role": "user", "content": "Go."}]


def chat_body(choice=None, schema=None, **more):
    """A body of the chat API, and its path."""
    tools = [
        {"type": "function", "function": {"name": k, "parameters": v}} for k, v in TOOLS.items()
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    named = {"type": "function", "function": {"name": choice}}
    return "/chat/completions", {
        "messages": ASK,
        **({"response_format": form} if schema else {}),
        **({"tools": tools, "tool_choice": named if choice in TOOLS else choice} if choice else {}),
        **more,
    }


def responses_body(choice=None, schema=None, **more):
    tools = [{"type": "function", "name": name, "parameters": v} for name, v in TOOLS.items()]
    named = {"type": "function", "name": choice}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    return "/responses", {
        "input": "Go.",
        **({"text": {"format": form}} if schema else {}),
        **({"tools": tools, "tool_choice": named if choice in TOOLS else choice} if choice else {}),
        **more,
    }


def messages_body(choice=None, schema=None, **more):
    tools = [{"name": name, "input_schema": v} for name, v in TOOLS.items()]
    named = {"type": "tool", "name": choice} if choice in TOOLS else {"type": "any"}
    return "/messages", {
        "messages": ASK,
        "max_tokens": 200,
        **(
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
            if schema
            else {}
        ),
        **({"tools": tools, "tool_choice": named} if choice else {}),
        **more,
    }


def said_in_chat(body):
    message = body["choices"][0]["message"]
    calls = [c["function"] for c in message.get("tool_calls", [])]
    return message["content"], [(c["name"], json.loads(c["arguments"])) for c in calls]


def said_in_responses(body):
    texts = [item["content"][0]["text"] for item in body["output"] if item["type"] == "message"]
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return "".join(texts), [(c["name"], json.loads(c["arguments"])) for c in calls]


def said_in_messages(body):
    texts = [block["text"] for block in body["content"] if block["type"] == "text"]
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    return "".join(texts), [(c["name"], c["input"]) for c in calls]


APIS = {
    "chat": (chat_body, said_in_chat),
    "responses": (responses_body, said_in_responses),
    "messages": (messages_body, said_in_messages),
}


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_json_by_a_schema_and_calls_that_must_come(api, gateway_of):
    body_of, said_in = APIS[api]

    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            said = []
            for wish in ({"schema": SCHEMA}, {"choice": "required"}, {"choice": "add"}):
                path, body = body_of(**wish)
                answer = await opened.post(policy, body, path)
                assert answer.status_code == 200, answer.text
                said.append(said_in(answer.json()))

            return said, policy.conversation.turns

    (structured, required, named), turns = asyncio.run(talk())
    fact = json.loads(structured[0])
    assert set(fact) == {"n", "s"} and 0 <= fact["n"] <= 9 and not structured[1]
    assert required[1] and {name for name, _ in required[1]} <= set(TOOLS)
    assert [name for name, _ in named[1]] == ["add"]
    assert set(named[1][0][1]) == {"n", "s"}
    assert all(turn.constraint is not None and turn.constraint.masks for turn in turns)
    assert all(turn.overrides is None for turn in turns)


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_a_stream_says_the_same(api, gateway_of):
    body_of, _ = APIS[api]

    async def talk(stream):
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            path, body = body_of(choice="required", stream=stream)
            assert (await opened.post(policy, body, path)).status_code == 200
            return policy.conversation.turns[0]

    streamed = asyncio.run(talk(True))
    whole = asyncio.run(talk(False))
    assert streamed.completion_ids == whole.completion_ids
    assert streamed.constraint == whole.constraint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "one"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("messages", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ],
)
def test_where_calls_may_not_be_parallel_one_comes(api, one, gateway_of):
    body_of, said_in = APIS[api]

    async def talk():
        async with gateway_of([]) as opened:
            calls = []
            for seed in range(4):
                path, body = body_of(choice="required")
                answer = await opened.post(policy_of(opened, seed), body | one, path)
                calls.append(said_in(answer.json())[1])
            return calls

    assert [len(calls) for calls in asyncio.run(talk())] == [1, 1, 1, 1]


def strict(path, body):
    """The same body, its tools strict in the words of its API."""
    tools = [
        tool | {"function": tool["function"] | {"strict": True}}
        if "function" in tool
        else tool | {"strict": True}
        for tool in body["tools"]
    ]
    return path, body | {"tools": tools}


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_a_call_of_a_strict_tool_that_nobody_required_fits_its_schema(api, gateway_of):
    body_of, said_in = APIS[api]
    path, body = strict(*body_of(choice="required"))
    del body["tool_choice"]
    body |= {"max_output_tokens" if api == "responses" else "max_tokens": 20}
    wrong = strict(path, body)[1]
    for tool in wrong["tools"]:
        tool.get("function", tool)["strict"] = "yes"

    async def talk():
        async with gateway_of([]) as opened:
            calls = []
            turns = []
            for seed in range(3):
                policy = policy_of(opened, seed)
                answer = await opened.post(policy, body, path)
                assert answer.status_code == 200, answer.text
                calls += said_in(answer.json())[1]
                turns += policy.conversation.turns

            return calls, turns, await opened.post(policy_of(opened), wrong, path)

    calls, turns, refused = asyncio.run(talk())
    assert all(set(arguments) == {"n", "s"} for name, arguments in calls if name == "add")
    assert all(turn.constraint is not None and turn.constraint.masks for turn in turns)
    assert '"strict": true' in turns[0].tools and "add" in turns[0].tools
    assert (refused.status_code, "strict is 'yes'" in refused.text) == (400, True)


@pytest.mark.slow
def test_json_mode_is_any_object(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            _, body = chat_body(response_format={"type": "json_object"}, max_tokens=3)
            answer = await opened.post(policy, body)
            return answer.json()["choices"][0]["message"]["content"]

    assert asyncio.run(talk()).startswith("{")


@pytest.mark.slow
def test_what_can_not_be_followed_is_a_400_and_the_attempt_goes_on(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            for schema, why in (
                ({"type": 3}, "can't be followed"),
                ({"$ref": "file:///etc/passwd"}, "can't be followed"),
                ({"enum": ["x" * 100_000]}, "the limit is 100000"),
            ):
                _, body = chat_body(schema=schema)
                answer = await opened.post(policy, body)
                assert answer.status_code == 400, answer.text
                assert why in answer.json()["error"]["message"]

            assert (await opened.post(policy, chat_body(schema=SCHEMA)[1])).status_code == 200
            assert policy.conversation.broken is None
            assert len(policy.conversation.turns) == 1

    asyncio.run(talk())


@pytest.mark.slow
def test_the_native_handle_asks_for_a_form_too(gateway_of):
    """The same seed gives the same tokens as through the gateway."""

    async def talk():
        async with gateway_of([]) as opened:
            native = policy_of(opened)
            other = policy_of(opened)
            reply = await native.generate(ASK, form=AnswerForm(schema=SCHEMA))
            await opened.post(other, chat_body(schema=SCHEMA)[1])
            return reply, native.turns[0], other.turns[0]

    reply, native, other = asyncio.run(talk())
    assert set(json.loads(reply.text)) == {"n", "s"}
    assert native.completion_ids == other.completion_ids
    assert native.constraint == other.constraint


def test_without_the_package_the_answer_is_the_line_that_installs_it(gateway_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def talk():
        async with gateway_of([]) as opened:
            return await opened.post(policy_of(opened), chat_body(schema=SCHEMA)[1])

    answer = asyncio.run(talk())
    assert answer.status_code == 400
    assert "pip install 'agentevo[constrained]'" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_turns_through_the_gateway_are_trained_at_ratio_1(gateway_of):
    """Free and constrained turns of one attempt, in one step."""

    async def attempt(number):
        async with gateway_of([]) as opened:
            policy = policy_of(opened, seed=number)
            auto = strict(*chat_body(choice="auto", max_tokens=30))[1]
            wishes = ({"schema": SCHEMA}, {"choice": "required"}, {"max_tokens": 12})
            for body in [*(chat_body(**wish)[1] for wish in wishes), auto]:
                answer = await opened.post(policy, body)
                assert answer.status_code == 200, answer.text
            turns = policy.conversation.turns_to_record({})

        return Trajectory(
            id=f"t{number}", task_id="t", group_id="g", turns=turns, reward=float(number)
        )

    trajectories = [asyncio.run(attempt(number)) for number in range(3)]
    model = copy.deepcopy(tiny_policy().model)
    trainer = Trainer(
        model,
        TrainerSection(warmup_steps=0),
        AlgorithmSection(),
        grammars=Grammars.of(model, tiny_policy().tokenizer),
    )
    prepared = trainer.prepare(trajectories)
    assert prepared.metrics["trainer/unmasked_tokens"] == 0

    metrics = trainer.step(prepared.samples)
    assert metrics["trainer/trained_tokens"] == sum(t.num_completion_tokens() for t in trajectories)
    assert metrics["actor/logprob_diff_max"] < 1e-5
