"""What serves tools over HTTP: whoever is slow, or only holds connections open, is cut off."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from agentevo.agents.tool_servers import http_serving
from agentevo.inference.serving import admission
from agentevo.inference.serving.http_server import open_socket
from agentevo.runtime.event_loop import run_coroutine

REQUEST = (
    b"POST /x HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 4\r\n\r\n"
)


LARGE = 2**20
"""So many times four bytes, eight times, are more than the machine keeps for who does not read."""


class Echo:
    """Answers with the body, and hears of its start and end."""

    def __init__(self):
        self.heard = []
        self.answered = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                self.heard.append((await receive())["type"])
                await send({"type": f"lifespan.{event}.complete"})
            return

        body = b""
        more = True
        while more:
            message = await receive()
            body = body + message.get("body", b"")
            more = message.get("more_body", False)

        await send({"type": "http.response.start", "status": 200, "headers": []})
        pieces = [body * LARGE] * 8 if body == b"much" else [body]
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        await send({"type": "http.response.body", "body": b""})
        self.answered.set()


def served(ask, key=None, app=None):
    """What `ask(port)` gives while the application is served."""
    app = app or Echo()
    is_over = asyncio.Event()

    async def work():
        listener = open_socket("127.0.0.1", 0)
        serving = asyncio.ensure_future(
            http_serving.serve_until(app, listener, is_over.is_set, key)
        )
        try:
            async with asyncio.timeout(300):
                return await ask(listener.getsockname()[1])
        finally:
            is_over.set()
            await serving

    found = run_coroutine(work())
    assert app.heard == ["lifespan.startup", "lifespan.shutdown"]
    return found


async def sent(port, *parts):
    """All that comes back until the connection ends, and how long that took."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()

    told = b""
    try:
        while part := await reader.read(2**16):
            told += part
    except ConnectionError:
        pass

    writer.close()
    return told, time.monotonic() - begun


@pytest.mark.slow
def test_slow_headers_slow_bodies_and_silence_are_cut_off(monkeypatch):
    monkeypatch.setattr(admission, "ADMISSION_S", 3.0)
    monkeypatch.setattr(http_serving, "BODY_S", 3.0)
    monkeypatch.setattr(http_serving, "IDLE_S", 3.0)
    whole = REQUEST % b"sesame"

    async def ask(port):
        return await asyncio.gather(
            sent(port),
            sent(port, whole[:30]),
            sent(port, whole, b"ab"),
            sent(port, whole, b"abcd"),
            sent(port, REQUEST % b"other", b"abcd"),
        )

    silent, headers, body, good, stranger = served(ask, key="sesame")
    assert (silent[0], headers[0]) == (b"", b"")
    assert b" 408 " in body[0] and b"has not come within 3 s" in body[0]
    assert b" 200 " in good[0] and b"abcd" in good[0], "and kept for IDLE_S"
    assert b" 200 " in stranger[0], "the application itself refuses a wrong key"


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(http_serving, "MAX_CONNECTIONS", 3)

    async def ask(port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in held[:3]:
            writer.write((REQUEST % b"")[:-2])

        ends = [asyncio.ensure_future(reader.read(1)) for reader, _ in held]
        for number, one in enumerate(asyncio.as_completed(ends), start=1):
            with suppress(ConnectionError):
                await one
            if number == 17:
                break

        told, _ = await sent(
            port, (REQUEST % b"").replace(b"Host", b"Connection: close\r\nHost"), b"abcd"
        )
        for one in ends:
            one.cancel()
        for _, writer in held:
            writer.close()

        return told

    told = served(ask)
    assert b" 200 " in told


@pytest.mark.parametrize("size", [0, 3 * 2**20])
def test_bodies_arrive_whole(size):
    head = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % size
    )

    async def ask(port):
        return await sent(port, head, b"x" * size)

    assert served(ask)[0].count(b"x") == size


@pytest.mark.slow
def test_who_does_not_take_an_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_serving, "TAKEN_S", 1.0)
    app = Echo()

    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(REQUEST % b"" + b"much")
        await app.answered.wait()

        got = 0
        with suppress(ConnectionError):
            while part := await reader.read(2**20):
                got += len(part)

        writer.close()
        return got

    assert served(ask, app=app) < 32 * LARGE


@pytest.mark.slow
def test_who_takes_a_large_answer_gets_all_of_it():
    head = (REQUEST % b"").replace(b"Host", b"Connection: close\r\nHost")

    async def ask(port):
        return len((await sent(port, head, b"much"))[0])

    assert served(ask) >= 32 * LARGE


@pytest.mark.parametrize(
    ("host", "key", "is_answered"),
    [
        (b"127.0.0.1:8000", None, True),
        (b"LOCALHOST.", None, True),
        (b"[::1]:8000", None, True),
        (b"attacker.example:8000", None, False),
        (b"127.0.0.1.attacker.example", None, False),
        (b"localhost.attacker.example", None, False),
        (b"", None, False),
        (b"retriever.example:8000", "k", True),  # the key tells who may ask
    ],
)
def test_no_web_page_asks_by_a_name_of_its_own(host, key, is_answered):
    """A page whose host was pointed at this machine (DNS rebinding) would read the corpus."""
    request = REQUEST.replace(b"localhost", host) % b"k"

    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + b"text")
        answer = await reader.readuntil(b"\r\n")
        writer.close()
        return answer

    assert (b" 200 " in served(ask, key)) == is_answered
