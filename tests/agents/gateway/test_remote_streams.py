"""A client that asks a remote model for a stream is sent what the model says as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from contextlib import closing

import pytest
from remote_server import (
    RemoteServer,
    chat,
    chunk,
    counted,
    fails,
    gives,
    hangs,
    hangs_up,
    message_events,
    pours,
    streams,
)

from agentevo.config.remote_models import RemoteModelSection
from agentevo.inference.remote_models import RemoteModels, model
from agentevo.types import Message, ToolCall

USER = {"role": "user", "content": "left or right ?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
DONE = b"data: [DONE]\n\n"
ASKED = {
    "/chat/completions": {"messages": [USER]},
    "/responses": {"input": "left or right ?"},
    "/messages": {"messages": [USER], "max_tokens": 9},
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(model, "FIRST_PAUSE_S", 0.01)


def models_of(server, folder=None, **keys):
    section = {"base_url": server.base_url, "model": "m", **keys}
    return closing(RemoteModels({"teacher": RemoteModelSection(**section)}, folder))


async def heard(opened, policy, path, **more) -> list:
    """(seconds, data) of the events that a client gets; `more["saw"]` is called at each of them."""
    saw = more.pop("saw", lambda data: None)
    body = {"model": "teacher", "stream": True, **ASKED[path], **more}
    key = {"Authorization": f"Bearer {policy.api_key}"}
    events = []
    url = policy.base_url + path
    async with opened.http.stream("POST", url, json=body, headers=key) as answer:
        if answer.status_code != 200:
            return [answer.status_code, json.loads(await answer.aread())]
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
                saw(line)

    return events


def talk(gateway_of, server, path="/chat/completions", folder=None, keys=None, **more):
    """The events of one stream, and what was recorded."""

    async def work(remote):
        async with gateway_of([], remote) as opened:
            policy = opened.policy()
            events = await heard(opened, policy, path, **more)
            return events, policy.remote.turns_to_record()

    with server, models_of(server, folder, **(keys or {})) as remote:
        return asyncio.run(work(remote))


@pytest.mark.slow
@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_first_token_is_passed_on_while_the_model_still_writes(gateway_of, path, api):
    has_come = threading.Event()
    start = chunk(role="assistant", content="ri")
    events = (
        [start, chunk(content="gh"), chunk(content="t"), chunk("stop"), counted(10, 4, 2), DONE]
        if api == "openai"
        else message_events("ri", "gh", "t")
    )
    if api == "anthropic":
        events = [b"".join(events[:4]), *events[4:]]

    server = RemoteServer(streams(*events, wait=has_come))

    def saw(line):
        if '"ri"' in line:
            has_come.set()

    told, turns = talk(gateway_of, server, path, keys={"api": api}, saw=saw)
    assert has_come.is_set()
    assert server.received[0]["stream"] is True

    text = json.dumps(told)
    assert "error" not in [event.get("type") for event in told], text

    (turn,) = turns
    assert turn.messages == [Message("user", USER["content"]), Message("assistant", "right")]

    tokens = (turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens)
    assert tokens == ((10, 2, 4) if api == "openai" else (12, 2, 4))


@pytest.mark.slow
def test_thoughts_and_tool_calls_come_too(gateway_of):
    def part(**call):
        return chunk(tool_calls=[{"index": 0, **call}])

    server = RemoteServer(
        streams(
            chunk(reasoning_content="Hm"),
            chunk(reasoning_content="m."),
            part(id="x1", type="function", function={"name": "look", "arguments": ""}),
            part(function={"arguments": '{"a"'}),
            part(function={"arguments": ": 1}"}),
            chunk("tool_calls"),
            DONE,
        )
    )
    options = {"include_usage": True}
    told, (turn,) = talk(gateway_of, server, tools=[TOOL], stream_options=options)
    deltas = [choice["delta"] for event in told for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hmm."

    begun, more = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert begun["function"] == {"name": "look", "arguments": ""}
    assert more == {"index": 0, "function": {"arguments": '{"a": 1}'}}
    assert turn.messages[-1].tool_calls == (ToolCall("look", '{"a": 1}', "x1"),)
    assert turn.messages[-1].reasoning == "Hmm."

    ends = [choice["finish_reason"] for event in told for choice in event["choices"]]
    assert ends[-1] == "tool_calls"


SAID = chunk(content="le")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (streams(SAID, then=hangs_up), "broke off"),
        (streams(SAID), "it ended in the middle"),
        (streams(SAID, b"data: {nonsense\n\n"), "sent an unreadable answer"),
        (streams(SAID, {"choices": [3]}), "sent an unreadable answer"),
        (streams(SAID, {"error": {"message": "out of memory"}}), "out of memory"),
        (streams(SAID, then=hangs), "has not answered within 5 s"),
    ],
)
def test_what_has_been_told_is_not_asked_again(gateway_of, fault, words, tmp_path):
    server = RemoteServer(fault, gives(chat("fine")))
    keys = {
        "timeout_s": 5.0 if "within 5 s" in words else 300.0,
        "budget": {"tokens": 5000},
        "max_new_tokens": 100,
    }
    told, turns = talk(gateway_of, server, folder=tmp_path, keys=keys)
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    assert told[1]["choices"][0]["delta"] == {"content": "le"}
    assert words in told[-1]["error"]["message"]
    assert turns == []
    assert len(server.received) == 1

    line = json.loads((tmp_path / "teacher.jsonl").read_text().splitlines()[-1])
    assert line["is_estimated"]
    assert line["tokens"] > 100


@pytest.mark.parametrize(
    "fault",
    [
        hangs_up,
        streams(chunk(role="assistant", content=""), then=hangs_up),
        streams(b"data: {nonsense\n\n"),
        fails(429, retry_after="0"),
        streams(),
    ],
)
def test_what_has_not_been_told_is_asked_again(gateway_of, fault):
    server = RemoteServer(fault, streams(chunk(content="left"), chunk("length")))
    told, (turn,) = talk(gateway_of, server)
    assert len(server.received) == 2
    assert (turn.messages[-1].text, turn.finish_reason) == ("left", "length")
    assert told[-1]["choices"][0]["finish_reason"] == "length"


def test_a_server_that_does_not_stream_is_heard_all_the_same(gateway_of):
    told, (turn,) = talk(gateway_of, RemoteServer(gives(chat("left"))))
    assert [event["choices"][0]["delta"].get("content") for event in told[:2]] == ["", "left"]
    assert turn.messages[-1].text == "left"


@pytest.mark.slow
def test_an_endless_answer_is_left_unread(gateway_of):
    server = RemoteServer(pours(100 * 2**20))
    told, turns = talk(gateway_of, server)
    assert told[0] == 424
    assert "answers with more than 67108864 bytes" in told[1]["error"]["message"]
    assert len(server.received) == 1
    assert turns == []


@pytest.mark.slow
def test_a_client_that_hangs_up_leaves_an_account_and_no_turn(gateway_of, tmp_path):
    goes_on = threading.Event()
    server = RemoteServer(streams(chunk(content="le"), chunk("stop"), counted(10, 4), wait=goes_on))

    async def work(remote):
        async with gateway_of([], remote) as opened:
            policy = opened.policy()

            def leave(line):
                if '"le"' in line:
                    raise ConnectionAbortedError

            with contextlib.suppress(ConnectionAbortedError):
                await heard(opened, policy, "/chat/completions", saw=leave)

            await asyncio.sleep(0.2)
            goes_on.set()
            async with asyncio.timeout(300):
                while not (tmp_path / "teacher.jsonl").exists():
                    await asyncio.sleep(0.05)

            return policy.remote.turns_to_record()

    with server, models_of(server, tmp_path) as remote:
        assert asyncio.run(work(remote)) == []

    (line,) = map(json.loads, (tmp_path / "teacher.jsonl").read_text().splitlines())
    assert (line["state"], line["completion_tokens"]) == ("completed", 4)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WANTED = {"name": "number", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("api", "path", "asked", "sent"),
    [
        (
            "openai",
            "/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {**WANTED, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            "openai",
            "/chat/completions",
            {"response_format": {"type": "json_object"}, "tools": [TOOL],
             "parallel_tool_calls": False},
            {"response_format": {"type": "json_object"}, "parallel_tool_calls": False},
        ),
        (
            "openai",
            "/responses",
            {"text": {"format": {"type": "json_schema", **WANTED}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA},
                }
            },
        ),
        (
            "anthropic",
            "/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (
            "anthropic",
            "/chat/completions",
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ),
        (
            "openai",
            "/messages",
            {"tools": [{"name": "look", "input_schema": {"type": "object"}}],
             "tool_choice": {"type": "tool", "name": "look"}},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
    ],
)  # fmt: skip
def test_the_form_of_an_answer_is_passed_on(gateway_of, api, path, asked, sent):
    whole = (
        chat("{}")
        if api == "openai"
        else {"content": [{"type": "text", "text": "{}"}], "usage": {"input_tokens": 3}}
    )
    server = RemoteServer(gives(whole))
    _, turns = talk(gateway_of, server, path, keys={"api": api}, **asked)
    assert len(turns) == 1
    assert {key: server.received[0].get(key) for key in sent} == sent

    others = {"response_format", "output_config", "parallel_tool_calls", "tool_choice"} - set(sent)
    assert not {key for key in others if server.received[0].get(key) not in (None, "auto")}


@pytest.mark.parametrize(
    ("api", "path", "asked", "words"),
    [
        ("anthropic", "/chat/completions", {"response_format": {"type": "json_object"}}, "schema"),
        ("openai", "/chat/completions", {"response_format": {"type": "grammar"}}, "json_schema"),
        (
            "openai",
            "/chat/completions",
            {"logprobs": True},
            "whose tokens the gateway does not know",
        ),
        ("openai", "/chat/completions", {"logit_bias": {"3": 1}}, "which gets no penalties"),
        ("openai", "/messages/count_tokens", {}, "whose tokens the gateway can't count"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(gateway_of, api, path, asked, words, monkeypatch):
    monkeypatch.setitem(ASKED, "/messages/count_tokens", {"messages": [USER]})
    if path.endswith("tokens"):
        asked = {"stream": None}

    server = RemoteServer()
    (status, body), _ = talk(gateway_of, server, path, keys={"api": api}, **asked)
    assert status == 400
    assert words in body["error"]["message"]
    assert server.received == []
