"""A run whose engines are tested."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import httpx
import pytest
from served_run import Run

from agentevo.agents.gateway.gateway import Gateway
from agentevo.inference.serving.secret import RunSecret
from agentevo.rollout.external_attempts import OutsideAgent, OutsideSessions
from agentevo.rollout.next_tasks import NextTasks
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.processes.session_routes import SessionRoutes
from agentevo.store.opening import open_store


@pytest.fixture
def run(small_config, tmp_path) -> Run:
    made = Run(
        small_config(
            tmp_path / "run",
            "rollout.poll_s=0.02",
            "engine.kv_cache_gb=0.1",
            "model.tiny.context_length=512",
        )
    )
    made.write(0)
    return made


@pytest.fixture
def gateways(loaded, chat, scripted_engine, small_config, tmp_path):
    """`async with gateways(says, *overrides) as gateway`: the routes, with an engine that says
    what it is told to, and a client that has the key."""

    @contextlib.asynccontextmanager
    async def make(says, *overrides, tasks=None):
        config = small_config(
            tmp_path / "run",
            "rollout.staleness=1",
            "rollout.policy=mask",
            "trainer.group_size=2",
            *overrides,
        )
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, says)
        store = await open_store(f"sqlite:///{tmp_path}/store.sqlite")
        agent = OutsideAgent(config.agent.timeout_s)
        notes = []
        listener = socket.create_server(("127.0.0.1", 0))
        gateway = Gateway(config.gateway, model="policy", timeout_s=300.0, listener=listener)
        sampler = Sampler(config, engine, chat, agent, store, 256, gateway=gateway)
        sessions = OutsideSessions(config, sampler, agent, engine, store, notes.append)
        secret = RunSecret(tmp_path / "gateway")
        source = None if tasks is None else TaskSource(config, tasks)
        next_tasks = NextTasks(config, source, sessions, store)
        routes = SessionRoutes(sessions, secret, engine.stats, next_tasks)
        gateway.added = routes
        base = await asyncio.to_thread(lambda: gateway.base)
        routes.bridge = gateway.bridge_to_current_loop()

        try:
            async with httpx.AsyncClient(
                base_url=base, headers=secret.header(), timeout=300
            ) as client:
                yield SimpleNamespace(
                    http=client, store=store, engine=engine, sessions=sessions, notes=notes
                )
            await sessions.close()
        finally:
            await asyncio.to_thread(sampler.close)
            await asyncio.to_thread(gateway.close)
            await store.close()

    return make
