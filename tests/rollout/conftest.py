"""An environment for the sampler's service: an engine whose version moves, agents that do as told,
services on one store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentevo.agents import Outcome
from agentevo.config import build_config
from agentevo.inference.engine import TokenListener
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.service import SamplerService
from agentevo.rollout.task_source import TaskSource
from agentevo.types import Completion, Message, SamplingParams, Task


class MovingEngine:
    """Draws a few tokens per request, each under the version at that moment, with a pause before
    each. `fails` are raised first, one per request."""

    def __init__(
        self,
        version: int = 0,
        *,
        seed: int = 0,
        pause_s: float = 0.0,
        fails: list[BaseException] | None = None,
    ) -> None:
        self.version = version
        self.pause_s = pause_s
        self.fails = fails or []
        self._rng = random.Random(seed)
        self.begun: list[tuple[str, int]] = []
        """Session and version of each request."""
        self.running = self.most_running = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
    ) -> Completion:
        self.begun.append((str(session), self.version))
        self.running += 1
        self.most_running = max(self.most_running, self.running)

        try:
            if self.fails:
                raise self.fails.pop(0)
            versions = []
            for _ in range(3):
                await asyncio.sleep(self._rng.random() * self.pause_s)
                versions.append(self.version)
        finally:
            self.running -= 1

        return Completion(
            ids=[5, 6, sampling.stop_token_ids[0]],
            logprobs=[-0.5] * 3,
            versions=versions,
            finish_reason="stop",
        )

    async def release(self, session: str) -> None:
        return

    async def publish(
        self, version: int, weights: object = None, *, deadline_s: float = 1.0
    ) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        return {}


class TwoTurns:
    """Asks twice, with what `between(task, policy)` gives in between."""

    def __init__(self, between: Callable[..., Any] = lambda task, policy: None) -> None:
        self._between = between
        self.seen: list[Task] = []

    async def run(self, task: Task, policy: Any) -> Outcome:
        self.seen.append(task)
        messages = [Message("user", "left")]
        reply = await policy.generate(messages)

        waits = self._between(task, policy)
        if waits is not None:
            await waits

        await policy.generate([*messages, reply.message, Message("user", "Go on.")])
        return Outcome(reward=1.0, success=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite'}"


@pytest.fixture
def moving_engine() -> type[MovingEngine]:
    return MovingEngine


@pytest.fixture
def two_turns() -> type[TwoTurns]:
    return TwoTurns


@pytest.fixture
def make_service(chat: Any) -> Callable[..., SamplerService]:
    """`make_service(engine, store, rollout, agent=..., steps=..., **arguments)`: 2 groups of 2
    attempts per step, out of 6 given tasks."""

    def make(
        engine: Any,
        store: Any,
        rollout: dict[str, Any] | None = None,
        *,
        agent: Any = None,
        steps: int = 6,
        tasks: int = 7,
        tree: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> SamplerService:
        config = build_config(
            {
                "trainer": {"group_size": 2, "groups_per_step": 2, "steps": steps},
                "evaluation": {"tasks": 1},
                "agent": {"timeout_s": 600},
                "rollout": {"poll_s": 0.005, "lease_s": 600.0} | (rollout or {}),
            }
            | (tree or {}),
            needs_environment=False,
        )
        source = TaskSource(config, [Task(id=f"t{i}", query=f"q{i}") for i in range(tasks)])
        sampler = Sampler(config, engine, chat, agent or TwoTurns(), store, 256)
        return SamplerService(config, sampler, engine, store, source, **{"worker": "w"} | arguments)

    return make
