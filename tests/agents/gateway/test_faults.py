"""What goes wrong at the gateway has a defined answer each, leaks nothing, and leaves nothing
behind that would be trained on and nobody acted on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest

from agentevo.agents.gateway import delivery
from agentevo.errors import EngineUnavailableError
from agentevo.inference.serving import http_server
from agentevo.types import Completion

USER = {"role": "user", "content": "left or right ?"}
BODIES = {
    "/chat/completions": {"model": "any", "messages": [USER]},
    "/responses": {"model": "any", "input": [USER]},
    "/messages": {"model": "any", "max_tokens": 20, "messages": [USER]},
}


def run(work):
    return asyncio.run(asyncio.wait_for(work, 300))


class Engine:
    """Draws `steps`, lists of ids, one each time that it is told to `go`; then does `last`."""

    version = 3
    slept_s = 0.0

    def __init__(self, steps, last=None):
        self.steps = steps
        self.last = last
        self.go = asyncio.Semaphore(0)
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.under_way = 0

    async def generate(self, prompt_ids, sampling, *, listen=None, **more):
        self.under_way += 1
        self.begun.set()
        try:
            for step in self.steps:
                await self.go.acquire()
                if listen is not None:
                    listen(step, [-0.5] * len(step))
            if self.last is not None:
                raise self.last
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.under_way -= 1

        ids = [token for step in self.steps for token in step]
        numbers = [-0.5] * len(ids), [3] * len(ids)
        return Completion(ids=ids, logprobs=numbers[0], versions=numbers[1], finish_reason="stop")

    async def release(self, session):
        return


@pytest.fixture
def left(loaded, chat):
    """The steps of an answer."""
    ids = loaded.tokenizer.encode("left right left", add_special_tokens=False)
    return [ids, [chat.end_of_turn_id]]


def address(policy):
    host, _, port = policy.session.base.split("//")[1].partition(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def connected(policy):
    """A connection, for bytes."""
    reader, writer = await asyncio.open_connection(*address(policy))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(policy, length, path="/chat/completions", **more):
    headers = {"Host": "x", "x-api-key": policy.api_key, "Content-Length": length, **more}
    lines = [f"POST /v1{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def said(reader):
    """(status, body) of the next answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    (length,) = [int(line[15:]) for line in lines if line.startswith("content-length:")]
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def nobody_is_left(opened, policy):
    """Neither at the gateway nor at the engine."""
    for _ in range(30_000):
        if not opened.engine.under_way and not policy.session._under_way:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a request is still under way")


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_no_turn(gateway_of, left, path, stream):
    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            body = json.dumps({**BODIES[path], "stream": stream}).encode()
            async with connected(policy) as (reader, writer):
                writer.write(head(policy, len(body), path) + body)
                await engine.begun.wait()
                if stream:
                    engine.go.release()
                    await reader.readuntil(b"right")

            await engine.cancelled.wait()
            await nobody_is_left(opened, policy)
            return policy.conversation.turns_to_record({}), policy.conversation.broken

    assert run(talk()) == ([], None)


@pytest.mark.slow
def test_an_answer_that_was_ready_when_its_client_had_gone_is_not_trained_on(gateway_of, left):
    """The engine answers while the sampler's loop is held, so that nothing can be cancelled."""

    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            body = json.dumps(BODIES["/chat/completions"]).encode()
            with socket.create_connection(address(policy), timeout=300) as connection:
                connection.sendall(head(policy, len(body)) + body)
                await engine.begun.wait()
                for _ in left:
                    engine.go.release()

            time.sleep(0.2)  # noqa: ASYNC251 (the gateway hears of it meanwhile)
            await nobody_is_left(opened, policy)
            await asyncio.sleep(0.05)
            return policy.turns, policy.conversation.turns_to_record({})

    turns, recorded = run(talk())
    assert recorded == []
    assert len(turns) == 1, "it was ready"


@pytest.mark.slow
def test_half_a_body_is_given_up_when_the_client_goes_and_when_time_is_over(
    gateway_of, monkeypatch
):
    monkeypatch.setattr("agentevo.agents.gateway.body.BODY_S", 0.3)

    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            async with connected(policy) as (_, writer):
                writer.write(head(policy, 100) + b'{"messages": [')
                await asyncio.sleep(0.05)

            async with connected(policy) as (reader, writer):
                writer.write(head(policy, 100) + b'{"messages": [')
                late = await said(reader)
                # What is left of the body is not taken for a request.
                writer.write(b"x" * 86)
                return late, policy.turns

    (status, body), turns = run(talk())
    assert status == 408 and "0.3 s" in json.loads(body)["error"]["message"]
    assert turns == []


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_100_mb_are_refused_before_they_are_sent(gateway_of, chunked):
    size = 100 * 2**20

    async def talk():
        async with gateway_of([], max_body_mb=1) as opened:
            policy = opened.policy()
            async with connected(policy) as (reader, writer):
                told = head(policy, size)
                if chunked:
                    length = f"Content-Length: {size}".encode()
                    told = told.replace(length, b"Transfer-Encoding: chunked")

                writer.write(told)
                answer = asyncio.ensure_future(said(reader))
                sent = 0

                if not chunked:
                    await answer

                part = b"x" * 2**16
                while not answer.done() and sent < size:
                    writer.write(b"10000\r\n" + part + b"\r\n" if chunked else part)
                    await writer.drain()
                    await asyncio.sleep(0)
                    sent += len(part)

                return await answer, sent, policy.turns

    (status, body), sent, turns = run(talk())
    assert status == 413 and "gateway.max_body_mb" in json.loads(body)["error"]["message"]
    assert sent < size / 4 if chunked else sent == 0
    assert turns == []


@pytest.mark.slow
def test_keys_of_others_and_of_the_past_open_nothing(gateway_of):
    async def talk():
        async with gateway_of(["left"] * 3) as opened:
            old = opened.policy("a")
            await opened.post(old, BODIES["/chat/completions"])
            key = old.api_key
            await old.close()
            new = opened.policy("a")  # the next attempt of the same name
            assert new.api_key != key

            tries = [
                key,
                key[:-1],
                key + "x",
                "",
                "none",
                f"{new.api_key}, {key}",
                new.session.base,
            ]
            headers = [{"x-api-key": one} for one in tries]
            headers += [{"Authorization": one} for one in (f"Basic {new.api_key}", "Bearer", "")]
            statuses = []
            for path, body in BODIES.items():
                for each in headers:
                    url = f"{new.session.base}/v1{path}"
                    answer = await opened.http.post(url, json=body, headers=each)
                    statuses.append(answer.status_code)
                    assert answer.json()["error"]["message"]

            for path in (f"/s/{key}/v1/models", f"/s/{key}/reward", "/s//v1/models", "/s/x"):
                answer = await opened.http.post(new.session.base + path, json={"reward": 1.0})
                statuses.append(answer.status_code)

            return statuses, new.turns, new.session.posted, len(old.turns)

    statuses, turns, posted, before = run(talk())
    assert set(statuses) <= {401, 404, 405}
    assert turns == [] and posted == [] and before == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_dies_in_mid_stream_ends_it_with_the_reason(gateway_of, left, path):
    async def talk():
        engine = Engine(left, last=EngineUnavailableError("it has gone"))
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            url = policy.session.base + "/v1" + path
            body = {**BODIES[path], "stream": True}
            key = {"x-api-key": policy.api_key}
            lines = []
            engine.go.release()

            async with opened.http.stream("POST", url, json=body, headers=key) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if "right" in line:
                        engine.go.release()

            await nobody_is_left(opened, policy)
            return lines, policy.conversation

    lines, conversation = run(talk())
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last = events[-1]
    error = last["response"]["error"] if path == "/responses" else last["error"]
    assert error["message"] == "it has gone"
    assert isinstance(conversation.broken, EngineUnavailableError)
    assert conversation.turns_to_record({}) == []


@pytest.mark.slow
def test_a_client_that_does_not_read_is_given_up(gateway_of, loaded, monkeypatch):
    monkeypatch.setattr(delivery, "READER_S", 0.2)
    listen_on = http_server.open_socket

    def with_small_buffers(*where):
        listener = listen_on(*where)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(http_server, "open_socket", with_small_buffers)
    ids = loaded.tokenizer.encode("left right " * 100, add_special_tokens=False)

    async def talk():
        engine = Engine([ids] * 20_000)
        async with gateway_of(engine) as opened:
            policy = opened.policy(context_length=10**6)
            body = json.dumps({**BODIES["/chat/completions"], "stream": True}).encode()
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(address(policy))
                connection.sendall(head(policy, len(body)) + body)

                while not engine.cancelled.is_set():
                    engine.go.release()
                    await asyncio.sleep(0.005)

                await nobody_is_left(opened, policy)
                return policy.conversation.turns_to_record({})

    assert run(talk()) == []


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reads", ["some", "none", "all"])
def test_a_long_answer_counts_where_its_client_took_the_whole(
    gateway_of, loaded, monkeypatch, stream, reads
):
    """`some`: it hangs up half-way; `none`: it stays and does not read."""
    if reads == "none":
        monkeypatch.setattr(delivery, "READER_S", 0.2)

    ids = loaded.tokenizer.encode("left right " * 2000, add_special_tokens=False)

    async def talk():
        async with gateway_of(Engine([ids])) as opened:
            policy = opened.policy(context_length=10**6)
            asked = {"stream": stream, "logprobs": True, "return_token_ids": True}
            body = json.dumps({**BODIES["/chat/completions"], **asked}).encode()
            opened.engine.go.release()

            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(address(policy))
                connection.settimeout(300)
                connection.sendall(head(policy, len(body), Connection="close") + body)
                if reads == "some":
                    await asyncio.to_thread(connection.recv, 1000)
                    connection.close()
                elif reads == "all":
                    await asyncio.to_thread(lambda: [*iter(lambda: connection.recv(65536), b"")])

                await nobody_is_left(opened, policy)
                for _ in range(30_000):
                    conversation = policy.conversation
                    if reads == "all" or conversation.metrics():
                        break
                    await asyncio.sleep(0.01)

                return len(conversation.turns), len(conversation.turns_to_record({}))

    assert run(talk()) == (1, reads == "all")


@pytest.mark.slow
def test_two_requests_of_a_session_at_once_are_two_turns(gateway_of, left):
    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            asked = [
                asyncio.create_task(opened.post(policy, BODIES["/chat/completions"]))
                for _ in range(2)
            ]
            while engine.under_way < 2:
                await asyncio.sleep(0)

            for _ in range(4):
                engine.go.release()

            first, second = [(await one).json()["choices"][0]["message"] for one in asked]
            for _ in range(2):
                engine.go.release()

            messages = [USER, first, {"role": "user", "content": "right"}]
            await opened.post(policy, {"model": "any", "messages": messages})
            return first, second, policy.turns

    first, second, turns = run(talk())
    assert first["content"] == second["content"]
    assert [turn.parent for turn in turns][:2] == [None, None]
    assert turns[2].parent in (0, 1) and len(turns) == 3
    assert turns[0].seed != turns[1].seed


@pytest.mark.slow
def test_more_requests_of_a_session_than_it_may_have_are_a_429(gateway_of, left, monkeypatch):
    monkeypatch.setattr("agentevo.agents.gateway.session.MAX_AT_ONCE", 3)

    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy("a")
            other = opened.policy("b")
            asked = [
                asyncio.create_task(opened.post(policy, BODIES["/chat/completions"]))
                for _ in range(3)
            ]

            while engine.under_way < 3:
                await asyncio.sleep(0)

            refused = await opened.post(policy, BODIES["/messages"], "/messages")
            asked.append(asyncio.create_task(opened.post(other, BODIES["/chat/completions"])))
            while engine.under_way < 4:
                await asyncio.sleep(0)

            for _ in range(8):
                engine.go.release()

            return refused, [(await one).status_code for one in asked]

    refused, others = run(talk())
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert others == [200] * 4, "its own requests and those of other sessions go on"


def test_an_attempt_that_ends_while_it_asks_is_a_conflict(gateway_of, left):
    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            before = asyncio.all_tasks()
            asking = asyncio.create_task(opened.post(policy, BODIES["/messages"], "/messages"))
            await engine.begun.wait()

            for task in asyncio.all_tasks() - before - {asking}:
                if "_Crossing" in repr(task):  # as the end of its TaskScope does
                    task.cancel()

            answer = await asking
            await nobody_is_left(opened, policy)
            return answer, policy.conversation.turns_to_record({})

    answer, recorded = run(talk())
    assert answer.status_code == 409 and "broken off" in answer.json()["error"]["message"]
    assert recorded == []


@pytest.mark.slow
def test_a_gateway_that_closes_ends_what_is_under_way(gateway_of, left, monkeypatch):
    monkeypatch.setattr(http_server, "GRACE_S", 0)

    async def talk():
        engine = Engine(left)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            body = json.dumps(BODIES["/chat/completions"]).encode()
            async with connected(policy) as (reader, writer):
                writer.write(head(policy, len(body)) + body)
                await engine.begun.wait()
                await asyncio.to_thread(opened.gateway.close)
                return await reader.read(), policy.conversation.turns_to_record({})

    rest, recorded = run(talk())
    assert not rest.startswith(b"HTTP/1.1 200") and recorded == []


def test_no_answer_waits_for_ever_for_a_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(delivery, "READER_S", 0.01)

    async def talk():
        with pytest.raises(TimeoutError):
            await delivery.limit_sends(lambda message: asyncio.sleep(300))({"type": "any"})

    asyncio.run(talk())
