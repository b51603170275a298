"""A model that is trained in this process: `agentevo.open_model`."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from agentevo.agents.policy import AttemptSession
from agentevo.api.loop import records
from agentevo.api.loop.attempts import MARGIN_S
from agentevo.api.loop.group import Group
from agentevo.api.loop.model import TrainableModel
from agentevo.api.loop.service import LoopService
from agentevo.config import RunConfig, build_config, sources
from agentevo.config.imports import check_code_of_run
from agentevo.config.named_agents import remote_agents
from agentevo.config.rewards import Reward, reward_entry
from agentevo.data.message_images import ImageCollector
from agentevo.errors import EngineUnavailableError
from agentevo.inference.remote_models import RemoteConversations
from agentevo.runs.folder.run_folder import is_run_folder
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread
from agentevo.types import RemoteTurn

NAMED = ("model", "algorithm")
"""Sections that may be only a name."""
UNBOUNDED = 10**9
"""`trainer.steps` of a loop without a fixed number of steps."""


class _OnTheRunsLoop:
    """An attempt's RemoteConversations, asked from the program's loop."""

    def __init__(self, service: LoopService, conversations: RemoteConversations) -> None:
        self._service = service
        self._own = conversations
        self.models = conversations.models
        self.images = conversations.images

    @property
    def turns(self) -> list[RemoteTurn]:
        return self._own.turns

    async def complete(self, *arguments: Any, **options: Any) -> list[RemoteTurn]:
        return await self._service.call(self._own.complete(*arguments, **options))

    def turns_to_record(self) -> list[RemoteTurn]:
        """See RemoteConversations.turns_to_record; once the attempt has ended."""
        return self._own.turns_to_record()

    def metrics(self) -> dict[str, float]:
        return self._own.metrics()


class LocalConnection:
    """A Connection to a run in this process."""

    def __init__(self, service: LoopService) -> None:
        self._service = service

    async def state(self) -> records.ModelState:
        return await self._service.call(self._service.state())

    async def group(self, task_id: str, *, greedy: bool) -> str:
        return await self._service.call(self._service.group(task_id, greedy=greedy))

    async def open(self, attempt: records.NewAttempt) -> records.OpenedService:
        service = self._service
        within_s = service.config.agent.timeout_s + 2 * MARGIN_S  # the longest that one may take
        try:
            return await service.call(
                service.attempts.open(attempt, has_session=False, within_s=within_s)
            )
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"{service.config.rollout.max_attempts} attempts are under way, which is "
                f"rollout.max_attempts, and none ended within {within_s:g} s"
            ) from error

    async def generate(
        self, attempt: records.OpenedService, ask: records.ServiceRequest
    ) -> records.Answers:
        return await self._service.call(self._service.attempts.generate(attempt.handle, ask))

    def session(self, attempt: records.OpenedService, agent: str = "") -> AttemptSession:
        attempts = self._service.attempts
        return self._service.call_now(lambda: attempts.session(attempt.handle, agent))

    async def remote(
        self, attempt: records.OpenedService, images: ImageCollector
    ) -> RemoteConversations | None:
        if not self._service.config.remote_models:
            return None
        conversations = self._service.attempts.remote(attempt.handle)
        assert conversations is not None
        conversations.images = images
        return cast("RemoteConversations", _OnTheRunsLoop(self._service, conversations))

    @property
    def remote_agents(self) -> Mapping[str, str]:
        return remote_agents(self._service.config)

    async def settle(self, attempt: records.OpenedService) -> records.Settled:
        return await self._service.call(self._service.attempts.settle(attempt.handle))

    async def end(self, attempt: records.OpenedService) -> records.EndedAttempts:
        return await self._service.call(self._service.attempts.end(attempt.handle))

    async def train(self, groups: Sequence[Group]) -> records.TrainedSubmission:
        return await self._service.call(self._service.train(groups))

    async def save(self) -> None:
        await self._service.call(self._service.save())

    async def checkpoints(self) -> list[records.Checkpoint]:
        return await self._service.call(self._service.checkpoints())

    async def fetch(self, checkpoint: records.Checkpoint, name: str, to: Path) -> None:
        def copy() -> None:
            shutil.copyfile(self._service.checkpoint_file(checkpoint.step, name), to)

        await in_thread(copy)


def loop_config(
    folder: Path, sections: Mapping[str, Any], overrides: Sequence[str] = ()
) -> RunConfig:
    """The configuration of the run in the folder, with these sections in place of its own; or that
    of a new run. Raises ConfigError."""
    before: dict[str, Any] = {"agent": {"type": "function"}, "trainer": {"steps": UNBOUNDED}}
    if is_run_folder(folder):
        before = sources.read_yaml(folder / "config.yaml")
        check_code_of_run(folder, before, overrides)

    before = sources.overlay(before, {"run": {"dir": str(folder), "overwrite": False}})
    options = {
        key: sources.plain_option(value, named=key in NAMED)
        for key, value in sections.items()
        if value is not None
    }
    return build_config(
        sources.overlay(before, options),
        overrides,
        where="agentevo.open_model",
        name=folder.name,
        needs_environment=False,
    )


@asynccontextmanager
async def open_model(
    folder: str | Path,
    *,
    rewards: Sequence[Reward] = (),
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = to_stderr,
    **sections: Any,
) -> AsyncIterator[TrainableModel]:
    """Opens a model for a training loop in your own program. An existing folder continues from its
    newest committed step.

    `sections` are the sections of a recipe, as in `agentevo.train`, such as
    `model="smollm2-135m-instruct"` or `trainer={"group_size": 4}`. A resumed run keeps every
    setting that you do not pass. `rewards` (names, options, functions) score rollouts that return
    no reward. `trainer.steps` is unlimited by default. Raises ConfigError before anything is
    created.
    """
    path = Path(folder)
    if rewards:
        sections["rewards"] = [reward_entry(reward) for reward in rewards]

    config = loop_config(path, sections, overrides)
    service = LoopService(config, resume=is_run_folder(path), gateway=None, note=note)
    try:
        await service.start()
        connection = LocalConnection(service)
        yield TrainableModel(connection, await connection.state(), config.rewards)
    finally:
        await service.close()
