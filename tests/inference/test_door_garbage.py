"""Bytes that are nothing, to an engine's door: whatever comes, with the secret or without, costs
its own connection alone, and no line in a log."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl

import pytest
from engine_door import Door, a_door

from agentevo.inference.serving import admission, server

HEAD = b"%s HTTP/1.1\r\nHost: e\r\n%s\r\n"
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def sayings(rng: random.Random, secret: bytes) -> list[bytes]:
    """What is sent on one connection, piece by piece: something right, with mistakes in it."""
    own = secret if rng.random() < 0.5 else rng.choice([b"", b"Authorization: Bearer x\r\n"])
    piece = rng.choice(
        [
            HEAD % (b"GET /state", own),
            HEAD % (b"POST /sleep", own + b"Content-Length: 7\r\n") + b'{"a":1}',
            HEAD % (b"POST /sleep", own + b"Transfer-Encoding: chunked\r\n") + b"3\r\n{}\n\r\nzz",
            HEAD % (b"GET /requests", own + UPGRADE),
            HEAD % (b"GET /requests", own + UPGRADE),
            HEAD % (b"OPTIONS *", own + b"Expect: 100-continue\r\n"),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            bytes(rng.randrange(256) for _ in range(40)),
        ]
    )
    frames = b"".join(
        bytes([rng.randrange(256), rng.choice([0x80, 0x85, 0xFE, 0xFF, 5])])
        + bytes(rng.randrange(256) for _ in range(rng.randrange(12)))
        for _ in range(rng.randrange(4))
    )
    pieces = [piece, frames]
    if rng.random() < 0.4:
        spoilt = bytearray(piece)
        for _ in range(rng.randrange(1, 4)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        pieces[0] = bytes(spoilt)

    if rng.random() < 0.3:
        cut = rng.randrange(len(piece))
        pieces = [piece[:cut], piece[cut:] + frames]

    return pieces


async def say(door: Door, rng: random.Random, tls: ssl.SSLContext | None) -> None:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=tls)
    except OSError:  # others have taken its place
        return

    try:
        for piece in sayings(rng, door.header()):
            writer.write(piece)
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.02]))

        if rng.random() < 0.5:
            async with asyncio.timeout(rng.choice([0.01, 0.2])):
                await reader.read(65536)

        if tls is None and rng.random() < 0.3:
            writer.write_eof()
    except (ConnectionError, TimeoutError, OSError):
        pass
    finally:
        writer.transport.abort() if rng.random() < 0.5 else writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [60, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", ["plain", "to TLS", "in TLS"])
def test_garbage_costs_its_own_connection_alone(number, way, tmp_path, monkeypatch, caplog):
    if way != "plain":
        pytest.importorskip("cryptography")

    monkeypatch.setattr(admission, "ADMISSION_S", 0.3)
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.1)

    async def work():
        tls = None
        if way == "in TLS":
            tls = ssl.create_default_context()
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE

        async with a_door(tmp_path, encrypted=way != "plain") as door:
            for first in range(0, number, 40):
                await asyncio.gather(
                    *(say(door, random.Random(seed), tls) for seed in range(first, first + 40))
                )

            monkeypatch.setattr(admission, "ADMISSION_S", 3600.0)
            assert await door.is_served()

    asyncio.run(work())
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not lines, (len(lines), set(lines))
