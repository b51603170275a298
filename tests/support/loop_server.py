"""A server of programs' loops in this process, and a client of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx

from agentevo.agents.gateway.gateway import Gateway
from agentevo.api.loop.client import Client
from agentevo.api.loop.routes import LoopRoutes
from agentevo.api.loop.server import LoopServer
from agentevo.config.gateway import GatewaySection
from agentevo.inference.serving.secret import RunSecret

URL = "http://127.0.0.1:9"


class Wire(httpx.AsyncHTTPTransport):
    """`loses`: the first answer to every other request is lost."""

    def __init__(self, *, loses=False):
        super().__init__()
        self._loses = loses
        self.lost: list[str] = []

    async def handle_async_request(self, request):
        answer = await super().handle_async_request(request)
        where = f"{request.method} {request.url.path.rpartition('/')[2]}"
        if self._loses and where not in self.lost:
            self.lost.append(where)
            await answer.aclose()
            raise httpx.ReadError("the connection broke")
        return answer


@asynccontextmanager
async def served(folder, *, loses=False):
    """(a client, its wire, the server)."""
    gateway = Gateway(GatewaySection(), model="policy", timeout_s=300)
    server = LoopServer(folder, gateway, max_models=1, note=lambda line: None)
    secret = RunSecret(folder / "gateway")
    gateway.added = LoopRoutes(server, secret)
    wire = Wire(loses=loses)
    try:
        base = await asyncio.to_thread(lambda: gateway.base)
        async with Client(base, secret.value()) as client:
            client._http = httpx.AsyncClient(
                transport=wire, base_url=base, headers=secret.header(), timeout=300
            )
            async with client._http:
                yield client, wire, server
    finally:
        await asyncio.to_thread(gateway.close)
