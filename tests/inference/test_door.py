"""An engine's door and those who have no business there: connections that say nothing or never end.
What they can hold is bounded, and it keeps nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import sys

import httpx
import msgspec
import pytest
from engine_door import SOON_S, CountingEngine, Door, a_door, closed_within, last_word
from websockets.exceptions import ConnectionClosed

from agentevo.inference.serving import admission, server
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.client_connection import ClientConnection, LostError
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.messages import MAX_BYTES, MAX_MESSAGES, Release
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.types import SamplingParams


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """Nobody is cut off for the time that it takes, but where a test is about that."""
    monkeypatch.setattr(admission, "ADMISSION_S", 3600.0)


@pytest.fixture
def hurried(patient, monkeypatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch) -> None:
    """Strangers have a third of a second."""
    monkeypatch.setattr(admission, "ADMISSION_S", 0.3)
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.05)


UPGRADE = (
    b"GET /requests HTTP/1.1\r\nHost: e\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"", b""),
        (b"GET /state HTTP/1.1\r\nHost: e\r\n", b""),
        (b"GET /state HTTP/1.1\r\nHost: e\r\nX: ", b"x"),
        (b"POST /sleep HTTP/1.1\r\nHost: e\r\nContent-Length: 1000000000\r\n\r\n", b"x"),
        (UPGRADE, b"x"),
        (UPGRADE[:-30], b""),
    ],
    ids=["nothing", "half a header", "a slow header", "a slow body", "refused", "half upgraded"],
)
def test_who_does_not_show_the_secret_soon_is_cut_off(
    first, again, tmp_path, hurried, caplog, monkeypatch
):
    async def work():
        async with a_door(tmp_path) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(first)

            async def trickle():
                while again:
                    await asyncio.sleep(0.05)
                    writer.write(again)

            trickling = asyncio.ensure_future(trickle())
            await closed_within(reader, SOON_S)
            trickling.cancel()
            writer.transport.abort()
            monkeypatch.setattr(admission, "ADMISSION_S", 3600.0)
            assert await door.is_served()

    asyncio.run(work())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half"])
def test_who_does_not_agree_on_tls_soon_is_cut_off(first, tmp_path, hurried, caplog, monkeypatch):
    pytest.importorskip("cryptography")

    async def work():
        async with a_door(tmp_path, encrypted=True) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(first)
            await closed_within(reader, SOON_S)
            writer.transport.abort()
            monkeypatch.setattr(admission, "ADMISSION_S", 3600.0)
            assert await door.is_served()

    asyncio.run(work())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_oldest_stranger_makes_room_for_the_next(encrypted, tmp_path, monkeypatch):
    if encrypted:
        pytest.importorskip("cryptography")

    monkeypatch.setattr(admission, "MAX_STRANGERS", 8)

    async def work():
        async with a_door(tmp_path, encrypted=encrypted) as door:
            strangers = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(40)]
            assert await door.is_served(), "nobody is kept out"
            for reader, _ in strangers[:30]:
                assert await closed_within(reader, SOON_S) == b""
            assert not any(reader.at_eof() for reader, _ in strangers[-4:])
            for _, writer in strangers:
                writer.transport.abort()

    asyncio.run(work())


@pytest.mark.slow
def test_a_client_that_is_in_stays_however_many_knock(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "MAX_STRANGERS", 8)

    async def work():
        async with a_door(tmp_path) as door:
            client = await door.client()
            hurry(monkeypatch)
            door.engine.takes_s = 1.0
            answer = asyncio.ensure_future(client.generate([5], SamplingParams(), None, SOON_S))
            strangers = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(40)]
            assert (await answer).ids == [5]
            await client.close()

            for _, writer in strangers:
                writer.transport.abort()

    asyncio.run(work())


def test_clients_are_bounded_and_who_leaves_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "MAX_CLIENTS", 2)

    async def work():
        async with a_door(tmp_path) as door:
            clients = [await door.client() for _ in range(2)]
            for client in clients:
                await client.look()

            late = await door.client()
            with pytest.raises(LostError, match="clients already: use another"):
                await late.generate([1], SamplingParams(), None, SOON_S)

            async with httpx.AsyncClient(trust_env=False, headers=door.secret.header()) as http:
                answer = await http.get(f"{door.address.url}/state")
                assert answer.status_code == 503 and "clients already" in answer.text

            await clients[0].close()
            async with asyncio.timeout(SOON_S):
                while True:
                    with contextlib.suppress(LostError):
                        assert await door.is_served()
                        break

            await clients[1].close()

    asyncio.run(work())


def test_without_a_file_descriptor_left_it_lets_strangers_go_and_goes_on(tmp_path, monkeypatch):
    class Full(socket.socket):
        """Has no descriptor for its third connection, once."""

        accepted = 0

        def accept(self):
            Full.accepted += 1
            if Full.accepted == 3:
                raise OSError(24, "Too many open files")
            return super().accept()

    async def work():
        plain = open_socket("127.0.0.1", 0)
        listener = Full(plain.family, plain.type, plain.proto, fileno=plain.detach())
        door = EngineApp(CountingEngine(), name="e", secret=RunSecret(tmp_path))
        async with listening(door, listener):
            here = Door(tmp_path, EngineAddress(url_of(listener)), door.engine)
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            await asyncio.sleep(0.05)
            _, other = await asyncio.open_connection("127.0.0.1", here.port)
            assert await here.is_served()
            assert await closed_within(reader, SOON_S) == b""

            for one in (writer, other):
                one.transport.abort()

    asyncio.run(work())


def test_a_body_is_bounded_in_length_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)

    async def work():
        async with a_door(tmp_path) as door:
            for length, body, status in ((10**9, b"x" * 8192, b"413"), (100, b"{", b"504")):
                reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
                writer.write(
                    b"POST /sleep HTTP/1.1\r\nHost: e\r\n" + door.header()
                    + f"Content-Length: {length}\r\n\r\n".encode() + body
                )  # fmt: skip
                answer = await closed_within(reader, SOON_S)
                assert answer.startswith(b"HTTP/1.1 " + status), answer
                writer.transport.abort()

            assert await door.is_served()

    asyncio.run(work())


def test_a_header_is_bounded_and_an_answer_is_the_last_on_its_connection(tmp_path):
    async def work():
        async with a_door(tmp_path) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(b"GET /state HTTP/1.1\r\nX: " + b"x" * 100_000)
            assert (await closed_within(reader, SOON_S)).startswith(b"HTTP/1.1 4")
            request = b"GET /state HTTP/1.1\r\nHost: e\r\n" + door.header() + b"\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(request * 100)
            assert (await closed_within(reader, SOON_S)).count(b"HTTP/1.1 200") == 1

    asyncio.run(work())


@pytest.mark.slow
def test_frames_are_bounded(tmp_path):
    release = msgspec.msgpack.encode(Release(session="a"))
    many = struct.pack("!BI", 0xDD, MAX_MESSAGES + 1) + release * (MAX_MESSAGES + 1)

    async def work():
        async with a_door(tmp_path) as door:
            for frame, code in (
                (b"x" * (MAX_BYTES + 1), 1009),
                (many, 1003),
                (msgspec.msgpack.encode([Release(session="x" * 5000)]), 1003),
            ):
                websocket = await door.websocket()
                with contextlib.suppress(ConnectionClosed):  # in the middle of it
                    await websocket.send(frame)
                assert (await last_word(websocket))[0] in (code, None)

            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(UPGRADE[:-2] + door.header() + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(struct.pack("!BBQ", 0x82, 0xFF, 2**30) + b"mask")  # a gigabyte is to come

            assert b"\x88" in await closed_within(reader, SOON_S), "a close frame, at once"
            assert await door.is_served() and door.engine.released == set()

    asyncio.run(work())


@pytest.mark.slow
def test_the_secret_is_in_no_log(tmp_path, caplog):
    """Not even at DEBUG, where the libraries write headers."""
    caplog.set_level(logging.DEBUG)

    async def work():
        async with a_door(tmp_path) as door:
            assert await door.is_served()
            async with httpx.AsyncClient(trust_env=False) as http:
                for headers in (door.secret.header(), {"Authorization": "Bearer wrong"}):
                    await http.get(f"{door.address.url}/state", headers=headers)
            return door.secret.value()

    assert asyncio.run(work()) not in caplog.text


def test_a_client_goes_nowhere_that_a_server_sends_it(tmp_path):
    async def work():
        visits = []

        async def elsewhere(reader, writer):
            visits.append(await reader.read(4096))
            writer.close()

        other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
        place = other.sockets[0].getsockname()[1]

        async def sends_on(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n"
                + f"Location: ws://127.0.0.1:{place}/requests\r\n\r\n".encode()
            )
            writer.close()

        first = await asyncio.start_server(sends_on, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{first.sockets[0].getsockname()[1]}"
        with pytest.raises(LostError):
            await ClientConnection.open(
                EngineAddress(url),
                secret=RunSecret(tmp_path),
                every_s=1.0,
                on_report=lambda state: None,
            )

        for one in (first, other):
            one.close()

        assert visits == []

    asyncio.run(work())


class Written:
    """A transport that holds the last hundred bytes itself, and its socket the rest."""

    def __init__(self, connected):
        self._socket = connected

    def get_write_buffer_size(self):
        return 100

    def get_extra_info(self, name):
        return self._socket

    def is_closing(self):
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what was taken")
def test_what_the_system_still_holds_was_not_taken():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listener.getsockname())

        writer, _ = listener.accept()
        with writer:
            writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            writer.setblocking(False)
            assert writer.send(bytes(2**19)) > 2 * admission.BUFFERED_BYTES
            connection = admission.AdmittedConnection(None, writer, 0.0)
            connection.transport = Written(writer)
            assert not asyncio.run(connection.received_all(0.05))
