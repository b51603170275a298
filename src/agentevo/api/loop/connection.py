"""The requests of a program's loop to the run that it trains, in this process (local.py) or behind
a server (client.py)."""

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
    """See the module. Every call has a deadline. A repeated call has no second effect."""

    async def state(self) -> ModelState: ...

    async def group(self, task_id: str, *, greedy: bool) -> str:
        """The id of a new group of attempts at a task."""

    async def open(self, attempt: NewAttempt) -> OpenedService:
        """Starts an attempt. It ends if it has no request for a long time."""

    async def generate(self, attempt: OpenedService, ask: ServiceRequest) -> Answers: ...

    def session(self, attempt: OpenedService, agent: str = "") -> AttemptSession:
        """The attempt's session at the gateway, for other API clients; `agent`: one of several
        agents, to get its own session."""

    async def remote(self, attempt: OpenedService) -> RemoteConversations | None:
        """The attempt's conversations with remote models, if there are any."""

    @property
    def remote_agents(self) -> Mapping[str, str]:
        """Agent -> the remote model that plays it."""

    async def settle(self, attempt: OpenedService) -> Settled:
        """The turns and posted rewards of the attempt's API clients so far."""

    async def end(self, attempt: OpenedService) -> EndedAttempts:
        """Ends the attempt: it takes no further call."""

    async def train(self, groups: Sequence[Group]) -> TrainedSubmission:
        """Trains one step. Returns once it is committed."""

    async def save(self) -> None:
        """Saves a checkpoint of the committed weights."""

    async def checkpoints(self) -> list[Checkpoint]: ...

    async def fetch(self, checkpoint: Checkpoint, name: str, to: Path) -> None:
        """Copies one file of a checkpoint."""
