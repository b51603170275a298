"""A gateway over an engine that says what it is told to. A module's TEMPLATE, if it has one, is the
chat template of its conversations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chat_templates import tokenizer_with

from agentevo.agents import Policy
from agentevo.agents.gateway.gateway import Gateway
from agentevo.config.gateway import GatewaySection
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.remote_models import RemoteConversations, RemoteModels
from agentevo.types import SamplingParams


@pytest.fixture
def loaded(request, tiny_policy):
    """A tokenizer with the parameter or the module's TEMPLATE; without either, a tiny policy."""
    template = getattr(request, "param", getattr(request.module, "TEMPLATE", None))
    if template is None:
        return tiny_policy(seed=2)
    return SimpleNamespace(tokenizer=tokenizer_with(template))


class Opened:
    """An open gateway: attempts on it, and a client."""

    def __init__(self, gateway: Gateway, make_policy: Any) -> None:
        self.gateway = gateway
        self.policy = make_policy
        self.http = httpx.AsyncClient(timeout=300)

    async def post(self, policy: Policy, body: Any, path: str = "/chat/completions", **more: Any):
        key = {"Authorization": f"Bearer {policy.api_key}"}
        return await self.http.post(policy.base_url + path, json=body, headers=key, **more)


@pytest.fixture
def gateway_of(loaded, chat, scripted_engine):
    """`async with gateway_of(says) as opened`, in an event loop."""

    @contextlib.asynccontextmanager
    async def make(
        says: Any,
        remote: RemoteModels | None = None,
        *,
        timeout_s: float = 300.0,
        **section: Any,
    ) -> AsyncIterator[Opened]:
        notes: list[str] = []
        engine = (
            says
            if hasattr(says, "generate")
            else scripted_engine(loaded.tokenizer, chat.end_of_turn_id, says)
        )
        gateway = Gateway(
            GatewaySection(**section), model="tiny", timeout_s=timeout_s, note=notes.append
        )

        def policy(name: str = "a", **options: Any) -> Policy:
            settings = {
                "name": name,
                "seed": 5,
                "context_length": 256,
                "timeout_s": 300.0,
            } | options
            conversation = Conversation(
                engine, chat, SamplingParams(max_new_tokens=20, temperature=0.7), **settings
            )
            beside = remote and RemoteConversations(remote, name=name, seed=5)
            return Policy(conversation, gateway, beside)

        opened = Opened(gateway, policy)
        opened.notes = notes
        opened.engine = engine
        try:
            yield opened
        finally:
            await opened.http.aclose()
            await asyncio.to_thread(gateway.close)

    return make
