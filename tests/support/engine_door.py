"""An engine's door on a real port, before an engine that answers at once, and clients that try
it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.client import connect

from agentevo.inference.engine import Engine
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.certificate import RunCertificate
from agentevo.inference.serving.client_connection import ClientConnection
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.types import Completion, SamplingParams

SOON_S = 60.0
"""Longer than any limit of these tests, on a busy machine too."""

WRONG_SAMPLING = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -1.0},
    {"temperature": 1e-40},
    {"temperature": 1e300},
    {"top_p": math.nan},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": -1},
    {"min_p": math.nan},
    {"min_p": 1.0},
    {"min_p": -0.1},
    {"max_new_tokens": 0},
    {"max_new_tokens": -5},
    {"stop_strings": ("",)},
    {"stop_strings": ("x" * 5000,)},
    {"stop_strings": ("x",) * 1000},
]
"""Parameters by which no engine can draw tokens."""


class CountingEngine:
    """Answers at once."""

    version = 3

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released: set[str] = set()
        self.most_tasks = 0
        """While conversations were released."""
        self.takes_s = 0.0

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        self.asked.append(prompt_ids[0])
        await asyncio.sleep(self.takes_s)
        return Completion(ids=prompt_ids, logprobs=[0.0], versions=[3], finish_reason="stop")

    async def release(self, session):
        if len(self.released) % 1000 == 0:
            self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        self.released.add(session)

    def stats(self):
        return {}


class Door:
    """A door on a real port, and ways to knock at it."""

    def __init__(self, folder, address: EngineAddress, engine: Any) -> None:
        self.secret = RunSecret(folder)
        self.address = address
        self.engine = engine
        self.port = int(address.url.rpartition(":")[2])

    async def client(self) -> ClientConnection:
        return await ClientConnection.open(
            self.address, secret=self.secret, every_s=60.0, on_report=lambda state: None
        )

    async def is_served(self) -> bool:
        client = await self.client()
        answer = await client.generate([7], SamplingParams(), None, SOON_S)
        await client.close()
        return answer.ids == [7]

    def header(self) -> bytes:
        return b"Authorization: " + self.secret.header()["Authorization"].encode() + b"\r\n"

    async def websocket(self):
        url = f"ws://127.0.0.1:{self.port}/requests"
        return await connect(
            url, additional_headers=self.secret.header(), proxy=None, max_size=None, max_queue=None
        )


@contextlib.asynccontextmanager
async def a_door(
    folder, *, encrypted: bool = False, engine: Engine | None = None
) -> AsyncIterator[Door]:
    engine = engine or CountingEngine()
    listener = open_socket("127.0.0.1", 0)
    tls, certificate = RunCertificate(folder).server_context() if encrypted else (None, "")
    address = EngineAddress(url_of(listener, encrypted=encrypted), certificate)
    async with listening(EngineApp(engine, name="e", secret=RunSecret(folder)), listener, tls=tls):
        yield Door(folder, address, engine)


async def closed_within(reader: asyncio.StreamReader, limit_s: float) -> bytes:
    """What comes until the other side has closed the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(limit_s):
            while part := await reader.read(65536):
                received += part
    return received


async def last_word(websocket) -> tuple[int | None, str | None]:
    """Code and reason with which the other side ends the connection."""
    async with asyncio.timeout(SOON_S):
        await websocket.wait_closed()
    return websocket.close_code, websocket.close_reason
