"""A server of programs' loops in this process, and a client of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx

from agentevo.gateway.app import Routes
from agentevo.loop.client import Client
from agentevo.loop.door import LoopDoor
from agentevo.loop.server import LoopServer

URL = "http://127.0.0.1:9"


class Admitted:
    """A connection that is let in."""

    def admit(self):
        return True

    def leave(self):
        pass

    def watch(self, on_lost):
        pass


class Wire(httpx.AsyncBaseTransport):
    """To a door in this process. `loses`: the first answer to every other request is lost."""

    def __init__(self, door, *, loses=False):
        async def app(scope, receive, send):
            await door.guard({**scope, "state": {"connection": Admitted()}}, receive, send)

        self._asgi = httpx.ASGITransport(app)
        self._loses = loses
        self.lost: list[str] = []

    async def handle_async_request(self, request):
        answer = await self._asgi.handle_async_request(request)
        where = f"{request.method} {request.url.path.rpartition('/')[2]}"
        if self._loses and where not in self.lost:
            self.lost.append(where)
            raise httpx.ReadError("the connection broke")
        return answer


@asynccontextmanager
async def served(folder, *, loses=False):
    """(a client, its wire, the server)."""
    server = LoopServer(folder, URL, max_models=1, note=lambda line: None)
    gateway = Routes(server.sessions, model="policy", timeout_s=300, max_body=2**20)
    door = LoopDoor(server, folder / "gateway", gateway)
    wire = Wire(door, loses=loses)
    try:
        async with Client(URL, door.secret.value()) as client:
            client._http = httpx.AsyncClient(
                transport=wire, base_url=URL, headers=door.secret.header()
            )
            yield client, wire, server
    finally:
        await server.close()
