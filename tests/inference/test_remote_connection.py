"""The connection between a client and an engine: who may connect, how requests and answers travel,
and how either side learns that the other is gone."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
from contextlib import AsyncExitStack

import httpx
import msgspec
import pytest
from fake_engines import PARAMS, Engines, ask, some, until
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agentevo.errors import (
    EngineError,
    EngineUnavailableError,
    MissingExtraError,
    RequestTooLongError,
)
from agentevo.inference.serving import server
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.messages import Generate, read_requests
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.types import Completion


def logged_problems(caplog) -> list[str]:
    """Log records above INFO."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname not in ("DEBUG", "INFO")
    ]


def test_a_request_and_its_answer_travel_whole(tmp_path):
    async def work():
        async with AsyncExitStack() as stack:
            engine = await Engines(tmp_path, stack).start(7)
            client = RemoteEngine(
                [one.url for one in EngineDirectory(tmp_path).living(5.0)],
                secret=RunSecret(tmp_path),
                poll_s=0.02,
            )
            stack.push_async_callback(client.close)
            assert client.version == -1, "nobody has been looked at"

            found = await client.generate([5, 6], PARAMS, session="a", deadline_s=300)
            assert found == Completion(
                ids=[7], logprobs=[-0.1 - 1e-9], versions=[3], finish_reason="stop"
            )

            ((ids, params, session, deadline_s),) = engine.asked
            assert (ids, params, session) == ([5, 6], PARAMS, "a")
            assert 200 < deadline_s < 300, "what is left of it"
            assert client.version == 3

            await client.release("a")
            await client.release("never heard of")
            await until(lambda: engine.released == ["a"])

    asyncio.run(work())


def test_the_server_says_what_is_wrong_with_a_request(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, _client):
            (announcement,) = engines.directory.living(5.0)
            async with httpx.AsyncClient(
                base_url=announcement.url, trust_env=False, headers=RunSecret(tmp_path).header()
            ) as http:
                for path, body, status in (
                    ("/sleep", b"no json", 400),
                    ("/sleep", b"", 500),
                    ("/wake", b"", 500),
                ):
                    answer = await http.post(path, content=body)
                    assert answer.status_code == status
                    assert msgspec.json.decode(answer.content)["error"] == "EngineError"

                state = (await http.get("/state")).json()
                assert (state["version"], state["asleep"], state["name"]) == (3, False, "e1")

    asyncio.run(work())


@pytest.mark.parametrize(
    "given", [None, "Bearer " + 64 * "0", "right", "Bearer", "Bearer \u00e9"], ids=repr
)
def test_strangers_get_nothing_but_the_reason(given, tmp_path, caplog):
    async def work():
        async with some(tmp_path, 1) as (engines, _client):
            (announcement,) = engines.directory.living(5.0)
            own = RunSecret(tmp_path).header()["Authorization"]
            given_here = {"right": own.replace("Bearer", "Basic")}.get(given, given)
            headers = {} if given is None else {"Authorization": given_here.encode("latin-1")}
            async with httpx.AsyncClient(
                base_url=announcement.url, trust_env=False, headers=headers
            ) as http:
                for answer in (
                    await http.get("/state"),
                    await http.post("/sleep"),
                    await http.post("/wake"),
                    await http.get("/nowhere"),
                ):
                    assert (
                        answer.status_code == 401
                        and "engines/secret in the run's folder" in answer.json()["message"]
                    )
                    assert own.split()[1] not in answer.text

            url = announcement.url.replace("http", "ws") + "/requests"
            texts = {key: header.decode("latin-1") for key, header in headers.items()}
            with pytest.raises(InvalidStatus, match="HTTP 403"):
                await connect(url, additional_headers=texts, proxy=None)

            assert engines.by_name["e1"].asked == []

    asyncio.run(work())
    assert logged_problems(caplog) == []


@pytest.mark.slow
def test_a_client_of_another_run_is_refused_until_it_has_the_secret(tmp_path, caplog):
    async def work():
        async with some(tmp_path / "engines", 1) as (engines, _client):
            other = RunSecret(tmp_path / "other")
            client = RemoteEngine(
                [one.url for one in engines.directory.living(5.0)], secret=other, poll_s=0.02
            )
            with pytest.raises(
                EngineUnavailableError,
                match=rf"to another run: it refuses the secret in {other.file}",
            ):
                await ask(client, deadline_s=2.0)

            assert (
                len([record for record in caplog.records if "to another run" in record.message])
                == 1
            ), "told once"
            assert engines.by_name["e1"].asked == []

            other.file.write_text(RunSecret(tmp_path / "engines").value())
            assert await ask(client) == 1

            await client.close()

    asyncio.run(work())
    with pytest.raises(TypeError, match="need a secret"):
        RemoteEngine(["http://127.0.0.1:1"])


@pytest.mark.slow
def test_a_secret_that_can_not_be_read_is_said_on_either_side(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            (announcement,) = engines.directory.living(5.0)
            RunSecret(tmp_path).file.write_text("short")

            shown = {"Authorization": "Bearer " + 64 * "0"}
            async with httpx.AsyncClient(base_url=announcement.url, trust_env=False) as http:
                answer = await http.get("/state", headers=shown)
                assert (await http.get("/state")).status_code == 401, "the file is for no stranger"

            assert (
                answer.status_code == 500
                and "secret holds no secret: delete it" in answer.json()["message"]
            )
            assert await ask(client) == 1, "who is in stays in"

            late = RemoteEngine(engines.directory, poll_s=0.02)
            with pytest.raises(EngineUnavailableError, match="secret holds no secret: delete it"):
                await ask(late, deadline_s=2.0)

            RunSecret(tmp_path).file.unlink()
            assert await ask(late) == 1, "either side makes another, and both use it"

            await late.close()

    asyncio.run(work())


def test_without_the_extra_it_is_said_what_to_install(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "websockets.asyncio.client", None)
        patch.delitem(sys.modules, "agentevo.inference.serving.client_connection")
        with pytest.raises(
            MissingExtraError,
            match=r"need the package 'websockets.*': pip install 'agentevo\[serve\]'",
        ):
            importlib.import_module("agentevo.inference.serving.client_connection")

    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "agentevo.inference.serving.server")
    with pytest.raises(
        MissingExtraError, match=r"package 'fastapi': pip install 'agentevo\[serve\]'"
    ):
        importlib.import_module("agentevo.inference.serving.server")


def test_requests_go_over_one_connection_in_few_frames(tmp_path):
    """200 at once, some of them longer than a frame is meant to be: each gets its own answer, and a
    state is no reply to any of them."""

    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engine = engines.by_name["e1"]
            (known,) = client._known.values()
            outbox = known.connection._outbox
            sent = []
            real = outbox.frame

            def frame():
                made = real()
                if made is not None:
                    sent.append((len(read_requests(made)), len(made)))
                return made

            outbox.frame = frame
            prompts = [[number] * (400_000 if number % 100 == 0 else 3) for number in range(1, 201)]

            async def one(prompt):
                await client.generate(prompt, PARAMS, session=f"s{prompt[0]}", deadline_s=300)
                await client.release(f"s{prompt[0]}")

            await asyncio.gather(*(one(prompt) for prompt in prompts))
            assert [asked[0] for asked in engine.asked] == prompts, (
                "in the order in which they were asked"
            )

            await until(
                lambda: sorted(engine.released) == sorted(f"s{number}" for number in range(1, 201))
            )
            assert sum(count for count, _ in sent) == 400 and 3 <= len(sent) < 40, sent
            assert all(size < 2**20 for _, size in sent), sent
            assert known.open == 0

    asyncio.run(work())


def test_answers_come_in_any_order_to_whom_they_belong(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engines.by_name["e1"].says = [0.3, RequestTooLongError("no"), 0.0, 60.0, 0.1]
            tasks = [asyncio.create_task(ask(client)) for _ in range(5)]
            await until(lambda: len(engines.by_name["e1"].asked) == 5)
            tasks[3].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [found[0], found[2], found[4]] == [1, 1, 1]
            assert isinstance(found[1], RequestTooLongError) and isinstance(
                found[3], asyncio.CancelledError
            )

            await until(lambda: engines.by_name["e1"].cancelled == 1)

    asyncio.run(work())


def test_clients_that_vanish_leave_no_trace_in_the_log(tmp_path, caplog):
    """Cut off in the middle of requests, of a handshake, of an HTTP body: the engine drops what it
    did for them and says nothing."""

    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engine = engines.by_name["e1"]
            engine.says = [60.0] * 3
            tasks = [asyncio.create_task(ask(client, deadline_s=300)) for _ in range(3)]
            await until(lambda: engine.running == 3)
            (known,) = client._known.values()
            address = known.url.removeprefix("http://").split(":")
            own = (
                b"Authorization: "
                + RunSecret(tmp_path).header()["Authorization"].encode()
                + b"\r\n"
            )
            for who, words in itertools.product((own, b""), (
                b"POST /sleep HTTP/1.1\r\nHost: e\r\nContent-Length: 99\r\n\r\n{",
                b"GET /requests HTTP/1.1\r\nHost: e\r\nUpgrade: websocket\r\nConnection: "
                b"Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            )):  # fmt: skip
                _, writer = await asyncio.open_connection(address[0], int(address[1]))
                writer.write(words.replace(b"Host: e\r\n", b"Host: e\r\n" + who))
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()

            known.connection._websocket.transport.abort()
            await until(lambda: engine.cancelled == 3 and engine.running == 0)
            assert await asyncio.gather(*tasks) == [1, 1, 1], (
                "by the same engine, on a new connection"
            )

    asyncio.run(work())
    assert logged_problems(caplog) == []


@pytest.mark.slow
def test_a_client_that_answers_no_pings_is_gone(tmp_path, monkeypatch):
    """Its machine or network is: nothing else would ever say so."""
    monkeypatch.setattr(server, "PING_S", 0.2)
    monkeypatch.setattr(server, "PING_TIMEOUT_S", 5.0)

    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engine = engines.by_name["e1"]
            engine.says = [60.0]
            (announcement,) = engines.directory.living(5.0)
            url = announcement.url.replace("http", "ws") + "/requests"
            websocket = await connect(
                url, additional_headers=RunSecret(tmp_path).header(), proxy=None, ping_interval=None
            )
            await websocket.send(
                msgspec.msgpack.encode(
                    [Generate(id=1, prompt_ids=[1], sampling=PARAMS, deadline_s=300.0)]
                )
            )
            await until(lambda: engine.running == 1)
            await asyncio.sleep(6.0)
            assert engine.running == 1, "who answers them stays"

            websocket.transport.pause_reading()
            await until(lambda: engine.cancelled == 1)
            websocket.transport.abort()
            assert await ask(client) == 1

    asyncio.run(work())


async def to_the_end(websocket) -> None:
    while True:
        await websocket.recv()


def test_what_is_no_list_of_requests_ends_the_connection_with_the_reason(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            (announcement,) = engines.directory.living(5.0)
            for frame in (
                b"no msgpack",
                "text",
                msgspec.msgpack.encode([{"type": "generate", "id": 1}]),
            ):
                url = announcement.url.replace("http", "ws") + "/requests"
                async with connect(
                    url, additional_headers=RunSecret(tmp_path).header(), proxy=None
                ) as websocket:
                    await websocket.send(frame)
                    with pytest.raises(ConnectionClosed) as raised:
                        await asyncio.wait_for(to_the_end(websocket), 300)
                    assert raised.value.rcvd.code == 1003
                    assert "not a list of requests" in raised.value.rcvd.reason

            assert await ask(client) == 1

    asyncio.run(work())


def test_whatever_an_engine_raises_is_answered(tmp_path, caplog):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engines.by_name["e1"].says = [ZeroDivisionError("by zero")]
            with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError: by zero"):
                await ask(client)
            assert await ask(client) == 1

    asyncio.run(work())
    assert "ZeroDivisionError" in caplog.text
