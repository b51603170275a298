"""A client names a remote model in place of the policy: it gets that one's answer, which is
recorded beside the policy's turns and not among them."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import openai
import pytest
from remote_server import RemoteServer, chat, fails, gives, hangs, sleeps

from agentevo.agents.gateway import api_routes
from agentevo.config.remote_models import RemoteModelSection
from agentevo.inference.remote_models import RemoteModels, model
from agentevo.types import Message, ToolCall

USER = {"role": "user", "content": "left or right ?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "x1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def models_of(server, **keys):
    section = {"base_url": server.base_url, "model": "m", **keys}
    return closing(RemoteModels({"teacher": RemoteModelSection(**section)}))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_talks_to_both_in_one_attempt(gateway_of, stream):
    async def said(client, name, messages, **options):
        create = client.chat.completions.create
        if not stream:
            answer = await create(model=name, messages=messages, **options)
            return answer.choices[0].message.model_dump(exclude_none=True), answer.usage

        content = ""
        calls = []
        usage = None
        options["stream_options"] = {"include_usage": True}
        async for chunk in await create(model=name, messages=messages, stream=True, **options):
            usage = chunk.usage or usage
            for delta in (choice.delta for choice in chunk.choices):
                content += delta.content or ""
                for call in delta.tool_calls or ():
                    if call.id:
                        calls.append(call.model_dump(exclude={"index"}))
                    else:
                        calls[-1]["function"]["arguments"] += call.function.arguments

        tool_calls = {"tool_calls": calls} if calls else {}
        return {"role": "assistant", "content": content, **tool_calls}, usage

    async def talk(remote):
        async with gateway_of(["left"], remote) as opened:
            policy = opened.policy()
            client = openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
            async with client:
                names = [one.id async for one in client.models.list()]
                own, _ = await said(client, "policy", [USER])
                first, usage = await said(client, "teacher", [USER], tools=[TOOL])
                first["tool_calls"][0]["function"]["arguments"] = '{ "a":1 }'  # as clients do
                result = {"role": "tool", "tool_call_id": "x1", "content": "a wall"}
                second, _ = await said(client, "teacher", [USER, first, result], tools=[TOOL])

            return names, own, usage, second, policy

    with (
        RemoteServer(
            gives(chat(None, tool_calls=[CALL], usage=(30, 5, 12))), gives(chat("right"))
        ) as server,
        models_of(server, price={"completion": 1e6}) as remote,
    ):
        names, own, usage, second, policy = asyncio.run(talk(remote))

    assert names == ["tiny", "teacher"]
    assert own["content"] == "left"
    assert (usage.prompt_tokens, usage.completion_tokens) == (30, 5)
    assert usage.prompt_tokens_details.cached_tokens == 12
    assert second["content"] == "right"
    assert [turn.messages[-1].text for turn in policy.turns] == ["left"]

    one, two = policy.remote.turns_to_record()
    assert one.messages[-1].tool_calls == (ToolCall("look", '{"a": 1}', "x1"),)
    assert json.loads(one.tools) == [TOOL]
    assert (two.parent, two.tools) == (0, "")
    assert two.messages == [
        Message("tool", "a wall", tool_call_id="x1"),
        Message("assistant", "right"),
    ]
    assert policy.remote.metrics() == {
        "num_remote_turns": 2.0, "remote_tokens": 49.0, "remote_cost": pytest.approx(9.0)
    }  # fmt: skip


def test_the_other_apis_lead_there_too(gateway_of):
    async def talk(remote):
        async with gateway_of([], remote) as opened:
            policy = opened.policy()
            asked = {"model": "teacher", "input": "Hello?"}
            response = (await opened.post(policy, asked, "/responses")).json()
            asked = {"model": "teacher", "messages": [USER], "max_tokens": 9}
            message = (await opened.post(policy, asked, "/messages")).json()
            n = {"model": "teacher", "messages": [USER], "n": 3}
            several = (await opened.post(policy, n)).json()
            return response, message, several, policy.remote.turns_to_record()

    with RemoteServer(gives(chat("right", usage=(10, 4)))) as server, models_of(server) as remote:
        response, message, several, turns = asyncio.run(talk(remote))

    assert response["output"][0]["content"][0]["text"] == "right"
    assert response["usage"]["input_tokens"] == 10
    assert message["content"] == [{"type": "text", "text": "right"}]
    assert message["usage"]["output_tokens"] == 4
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len(turns) == 5
    assert server.received[1]["max_tokens"] == 9
    assert len({body["seed"] for body in server.received}) == 5, "a seed of its own each"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "body", "status", "words"),
    [
        (fails(500), {}, 424, "no usable answer after 2 requests"),
        (fails(401), {}, 424, "refuses the key"),
        (gives(chat()), {"logprobs": True}, 400, "whose tokens the gateway does not know"),
        (gives(chat()), {"return_token_ids": True}, 400, "whose tokens the gateway does not know"),
        (gives(chat()), {"budget": {"tokens": 5}}, 424, "budget.tokens=5"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_are_the_clients_to_see(
    gateway_of, monkeypatch, fault, body, status, words, stream
):
    monkeypatch.setattr(model, "FIRST_PAUSE_S", 0.01)

    async def talk(remote):
        async with gateway_of([], remote) as opened:
            policy = opened.policy()
            asked = {"model": "teacher", "messages": [USER], "stream": stream, **body}
            return await opened.post(policy, asked), policy

    budget = body.get("budget", {})
    body = {key: value for key, value in body.items() if key != "budget"}
    with (
        RemoteServer(fault) as server,
        models_of(server, max_tries=2, budget=budget) as remote,
    ):
        answer, policy = asyncio.run(talk(remote))

    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert policy.remote.turns_to_record() == []


@pytest.mark.slow
def test_what_a_client_did_not_wait_for_is_not_recorded(gateway_of):
    async def talk(remote):
        async with gateway_of([], remote) as opened:
            policy = opened.policy()
            asked = opened.post(policy, {"model": "teacher", "messages": [USER]})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.2)
            await asyncio.sleep(0.5)
            return policy.remote.turns_to_record()

    with RemoteServer(sleeps(0.4)) as server, models_of(server) as remote:
        assert asyncio.run(talk(remote)) == []


@pytest.mark.slow
def test_its_own_deadline_bounds_the_wait_and_not_that_of_the_policys_engine(gateway_of):
    """The engine's here has long passed when the remote model answers; one whose own deadline
    passes is named with it."""

    async def talk(remote):
        async with gateway_of([], remote, timeout_s=0.2 - api_routes.MARGIN_S) as opened:
            policy = opened.policy()
            asked = {"model": "teacher", "messages": [USER]}
            return await opened.post(policy, asked)

    with RemoteServer(sleeps(1.0), gives(chat("late"))) as server, models_of(server) as remote:
        answer = asyncio.run(talk(remote))
    assert answer.status_code == 200, answer.text
    with RemoteServer(hangs) as server, models_of(server, deadline_s=0.5) as remote:
        answer = asyncio.run(talk(remote))

    assert answer.status_code == 424
    assert "remote model teacher: " in answer.json()["error"]["message"]
