"""The connection from a program's own training loop to its run. The run is in this process
(local.py) or behind a server (client.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentevo.agents.policy import AttemptSession
from agentevo.api.loop.group import Group
from agentevo.api.loop.records import (
    Answers,
    Checkpoint,
    EndedAttempts,
    ModelState,
    NewAttempt,
    OpenedService,
    ServiceRequest,
    Settled,
    TrainedSubmission,
)
from agentevo.inference.remote_models import RemoteConversations


class LoopConnection(Protocol):
    """A loop's requests to its run. Every call has a deadline. A repeated call has no second
    effect."""

    async def state(self) -> ModelState: ...

    async def group(self, task_id: str, *, greedy: bool) -> str:
        """The id of a new group of attempts at a task."""

    async def open(self, attempt: NewAttempt) -> OpenedService:
        """Starts an attempt. An attempt without requests for a long time ends by itself."""

    async def generate(self, attempt: OpenedService, ask: ServiceRequest) -> Answers: ...

    def session(self, attempt: OpenedService, agent: str = "") -> AttemptSession:
        """The attempt's session at the gateway, for other API clients; With several
        agents, each has its own session, which `agent` names."""

    async def remote(self, attempt: OpenedService) -> RemoteConversations | None:
        """The attempt's conversations with remote models, if there are any."""

    @property
    def remote_agents(self) -> Mapping[str, str]:
        """Agent -> the remote model that plays it."""

    async def settle(self, attempt: OpenedService) -> Settled:
        """The turns and posted rewards of the attempt's API clients so far."""

    async def end(self, attempt: OpenedService) -> EndedAttempts:
        """Ends the attempt, which then accepts no further calls."""

    async def train(self, groups: Sequence[Group]) -> TrainedSubmission:
        """Trains one step, and returns when the step is committed."""

    async def save(self) -> None:
        """Saves a checkpoint of the committed weights."""

    async def checkpoints(self) -> list[Checkpoint]: ...

    async def fetch(self, checkpoint: Checkpoint, name: str, to: Path) -> None:
        """Copies one file of a checkpoint."""
