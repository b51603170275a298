"""The records between a program's loop and the run that it trains: over the network as JSON, in one
process unchanged.

The connection from a program's own training loop to its run. The run is in this process
(local.py) or behind a server (client.py).

Failures that only a program's own loop meets.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agentevo.agents.policy import AttemptSession
from agentevo.agents.posted_rewards import PostedReward
from agentevo.api.loop.group import Group
from agentevo.data.message_images import ImageCollector
from agentevo.errors import AgentEvoError, EngineUnavailableError
from agentevo.inference.remote_models import RemoteConversations
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.types import Message, SamplingOverrides, Turn
from agentevo.types.images import ImageFile


class SealError(AgentEvoError):
    """Submitted groups have tokens that the run's engine did not sample."""


class UnknownAttemptError(EngineUnavailableError):
    """An attempt is not running: the server was restarted, or ended it."""


class ModelNotOpenError(EngineUnavailableError):
    """A server has not opened the model: it was restarted, or has closed it."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of a run."""

    name: str
    step: int
    """The number of committed steps, which is the version of the weights."""
    group_size: int
    """`trainer.group_size`: attempts of a group, unless the program says otherwise."""
    max_attempts: int
    """`rollout.max_attempts`: how many may be under way at once."""
    attempt_timeout_s: float
    """`agent.timeout_s`."""
    request_timeout_s: float
    """`engine.timeout_s`."""
    seed: int = 0
    """`run.seed`."""
    has_baseline: bool = False
    """Whether the algorithm compares a group with a greedy attempt at the same task."""
    agents: list[str] = []
    """The names of several agents, in the order of their trajectories; empty if there is one."""
    trained_agents: list[str] = []
    """The trained ones among them, the main one first."""


class NewAttempt(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    group_id: str
    number: int
    greedy: bool = False
    elsewhere: list[str] = []
    """Names of models that the program calls itself. A client can't reach the policy by these
    names."""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """A repeated request has the same id, and gets the same attempt."""


class OpenedService(msgspec.Struct, frozen=True, kw_only=True):
    """A started attempt."""

    handle: str
    """The name for requests about it; it can't be guessed."""
    names: dict[str, str]
    """The id of each agent's trajectory; a single agent has an empty name."""
    keys: dict[str, str] = {}
    """Agent -> its key at the gateway, where its own clients have one from the start; the key
    without a name is valid for all of several agents."""
    sees_images: bool = False
    """Whether the model reads images."""


class ServiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the policy."""

    id: str
    """The id of a call: a repeated call has the same id, and gets the same answer."""
    agent: str = ""
    """The agent, if there are several."""
    messages: list[Message] | None = None
    ids: list[int] | None = None
    """Token ids in place of messages."""
    tools: list[dict[str, Any]] | None = None
    overrides: SamplingOverrides | None = None
    form: AnswerForm | None = None
    """The required form of the answer."""
    n: int = 1
    images: list[ImageFile] = []
    """Images that the messages name and that no earlier call of the attempt has sent."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's answer."""

    turns: list[Turn]
    openings: list[str]
    """The opening that the chat template wrote for each turn."""
    slept_s: float
    """Seconds that the engine has slept until now."""


class SettledAgent(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one agent until now."""

    turns: list[Turn]
    received: list[int]
    """Indices of the turns that a client has received."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an attempt's own clients until now."""

    agents: dict[str, SettledAgent]
    posted: list[PostedReward]


class EndedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one agent in an attempt."""

    turns: list[Turn]
    """The turns that a client has received, renumbered."""
    numbers: dict[int, int]
    """Index of a turn during the attempt -> its index in `turns`."""
    metrics: dict[str, float]
    broken: str | None
    """The engine's failure, if there was one."""
    seal: str
    """Proves that the engine sampled `turns` in this attempt (contents.py)."""


class EndedAttempts(msgspec.Struct, frozen=True, kw_only=True):
    agents: dict[str, EndedAgent]


class TrainedSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step."""

    step: int
    metrics: dict[str, float | None]
    """The step's row in metrics.jsonl."""
    dropped: dict[str, str] = {}
    """Trajectory id -> why it was not trained on."""

    @property
    def reward(self) -> float:
        """The mean reward of the attempts that the step was given."""
        value = self.metrics.get("critic/score/mean")
        return float("nan") if value is None else value


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A saved version of the weights."""

    step: int
    files: dict[str, int]
    """Path within the checkpoint's folder -> size in bytes."""


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """Groups for one step."""

    groups: list[Group]


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

    async def remote(
        self, attempt: OpenedService, images: ImageCollector
    ) -> RemoteConversations | None:
        """The attempt's conversations with remote models, if there are any. `images`: those of the
        attempt, which its messages name."""

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
