"""Whatever comes to the gateway gets an answer of the API's own form, or nothing, and never a
500; and the gateway answers the next one."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import socket
import threading

import pytest
from chat_templates import HERMES, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.agents import Policy
from agentevo.agents.gateway.gateway import Gateway
from agentevo.config.gateway import GatewaySection
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Completion, SamplingParams
from examples import examples

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
USER = {"role": "user", "content": "left or right ?"}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "right"}]},
        USER,
        {
            "role": "assistant",
            "content": "left",
            "reasoning_content": "x",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "right", "name": "f"},
        USER,
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "n": 1,
    "stop": ["x"],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 0,
    "seed": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "stream": False,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}
COMPLETIONS = {
    "model": "m",
    "prompt": ["left", "right"],
    "n": 2,
    "best_of": 2,
    "echo": True,
    "stop": ["x"],
    "max_tokens": 3,
    "seed": 1,
    "logprobs": None,
    "return_token_ids": True,
    "stream": False,
    "stream_options": {"include_usage": True},
}
RESPONSES = {
    "model": "m",
    "instructions": "right",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "left"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "right"},
        {"type": "message", "role": "user", "content": "left"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": None}],
    "tool_choice": "auto",
    "max_output_tokens": 3,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "store": True,
    "previous_response_id": None,
    "stream": False,
}
MESSAGES = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "right"}],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "text", "text": "left"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "right"}],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA, "description": "x"}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stream": False,
}
DOORS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/reward": {"rewards": {"right": 1.0}, "turn": None, "reward": None},
}
STATUSES = {200, 400, 404, 413, 429}

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**200, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ["auto", "user", "tool", "text", "left", "type", "\x00", "<|im_end|>", "e" * 999]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "id", "text", "name", "x"]), inner
        )
    ),
    max_leaves=6,
)


def places_in(value, path=()):
    """The paths of all values, that of the whole last."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places_in(inner, (*path, key))

    yield path


@st.composite
def bodies(draw):
    """A path and a body that was right before up to three of its values became others."""
    path = draw(st.sampled_from(sorted(DOORS)))
    body = copy.deepcopy(DOORS[path])
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from([p for p in places_in(body) if p] or [("x",)]))
        holder = body
        for key in above:
            holder = holder[key]

        match draw(st.sampled_from(["replace", "replace", "remove", "repeat", "stream"])):
            case "remove" if isinstance(holder, dict):
                holder.pop(last, None)
            case "repeat" if isinstance(holder, list):
                holder.insert(last, draw(JUNK))
            case "stream" if "stream" in body:
                body["stream"] = True
            case _:
                holder[last] = draw(JUNK)

    return path, body


class SaysLeft:
    version = 0
    slept_s = 0.0

    def __init__(self, ids):
        self.ids = ids

    async def generate(self, prompt_ids, sampling, *, listen=None, **more):
        if listen is not None:
            listen(self.ids, [-1.0] * len(self.ids))
        logprobs = [-1.0] * len(self.ids)
        versions = [0] * len(self.ids)
        return Completion(ids=self.ids, logprobs=logprobs, versions=versions, finish_reason="stop")

    async def release(self, session):
        return


@pytest.fixture(scope="module")
def endpoint():
    """(host, port, key) of an open gateway whose policy says "left", whatever it is asked."""
    chat = ChatFormat(tokenizer_with(HERMES))
    ids = [*chat.tokenizer.encode("left", add_special_tokens=False), chat.end_of_turn_id]
    ready = threading.Event()
    opened = []
    stop = []

    async def live():
        gateway = Gateway(GatewaySection(max_body_mb=0.1), model="tiny", timeout_s=300.0)
        conversation = Conversation(
            SaysLeft(ids),
            chat,
            SamplingParams(max_new_tokens=20, temperature=0.7),
            name="a",
            seed=5,
            context_length=4096,
            timeout_s=300.0,
        )
        policy = Policy(conversation, gateway)
        stop.append(asyncio.Event())
        opened.extend((asyncio.get_running_loop(), policy.api_key, policy.base_url))
        ready.set()
        await stop[0].wait()
        await asyncio.to_thread(gateway.close)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(300)

    loop, key, url = opened
    host, _, port = url.split("//")[1].split("/")[0].partition(":")
    yield host, int(port), key
    loop.call_soon_threadsafe(stop[0].set)
    thread.join(300)


def ask(endpoint, path, body: bytes):
    host, port, key = endpoint
    connection = http.client.HTTPConnection(host, port, timeout=300)
    try:
        connection.request("POST", f"/s/{key}{path}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type"), answer.read()
    finally:
        connection.close()


def check(path, status, kind, content):
    assert status in STATUSES, (status, content)
    if kind.startswith("text/event-stream"):
        events = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")]
        assert events and not any("error" in json.loads(event) for event in events), content
        return

    answer = json.loads(content)
    if status != 200:
        assert answer["error"]["message"] and answer["error"]["type"]
        assert answer.get("type") == ("error" if "messages" in path else None)


def fuzz(endpoint, number):
    @settings(max_examples=number, deadline=None, database=None)
    @given(bodies())
    def answered(case):
        path, body = case
        check(path, *ask(endpoint, path, json.dumps(body).encode()))

    answered()


@pytest.mark.slow
def test_no_body_is_a_500(endpoint):
    fuzz(endpoint, examples(100))


@pytest.mark.soak
def test_no_body_is_a_500_however_long_one_tries(endpoint):
    fuzz(endpoint, 5000)


REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"
    b"Content-Type: application/json\r\nContent-Length: 25\r\n\r\n" + b'{"messages": "wrong"}    '
)


@st.composite
def streams_of_bytes(draw):
    """A request with some of its bytes others, more or fewer, or bytes of no request at all."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))

    data = bytearray(REQUEST)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        data[start:end] = draw(
            st.binary(max_size=4)
            | st.sampled_from([b"\r\n", b"\n", b"chunked", b"Transfer-Encoding: chunked\r\n", b":"])
        )

    return bytes(data)


def answer_to(endpoint, data: bytes) -> bytes:
    """All that comes back on a connection whose client says this and no more."""
    host, port, key = endpoint
    with socket.create_connection((host, port), timeout=300) as connection:
        connection.sendall(data.replace(b"KEY", key.encode()))
        connection.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while part := connection.recv(65536):
                said += part
        except ConnectionResetError:
            pass

        return said


def fuzz_bytes(endpoint, number):
    @settings(max_examples=number, deadline=None, database=None)
    @given(streams_of_bytes())
    def answered(data):
        said = answer_to(endpoint, data)
        assert said == b"" or said.startswith(b"HTTP/1.1 "), said
        assert not said.startswith(b"HTTP/1.1 5"), (data, said)

    answered()
    status, *_ = ask(endpoint, "/v1/chat/completions", json.dumps(CHAT).encode())
    assert status == 200


def test_no_bytes_break_the_gateway(endpoint):
    fuzz_bytes(endpoint, examples(60))


@pytest.mark.soak
def test_no_bytes_break_the_gateway_however_long_one_tries(endpoint):
    fuzz_bytes(endpoint, 3000)


def test_a_stream_of_several_prompts_begins_when_all_can_be_asked(endpoint):
    body = DOORS["/v1/completions"] | {"prompt": ["right", ""], "stream": True}
    status, kind, content = ask(endpoint, "/v1/completions", json.dumps(body).encode())
    assert status == 400 and kind.startswith("application/json") and b"is empty" in content
