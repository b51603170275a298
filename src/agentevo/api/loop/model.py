"""A model that a program's own loop trains. `agentevo.open_model` and `Client.open_model` return
it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec

from agentevo.api.loop.group import Group
from agentevo.api.loop.records import Checkpoint, LoopConnection, ModelState, TrainedSubmission
from agentevo.errors import ConfigError, UnusableCheckpointError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.rewards import RewardConfig
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.files import atomic_folder

MAX_PARALLEL_FETCHES = 4
"""The maximum number of files of a checkpoint that are fetched at once."""


class TrainableModel:
    """A model that a program's own loop trains, from one event loop."""

    def __init__(
        self, connection: LoopConnection, state: ModelState, rewards: Sequence[RewardConfig] = ()
    ) -> None:
        """`rewards` score rollouts that return no reward."""
        self.connection = connection
        self.rewards = tuple(rewards)
        self._state = state
        self._slots = asyncio.Semaphore(state.max_attempts)

    def __repr__(self) -> str:
        return f"<TrainableModel {self.name!r}: {self.step} steps committed>"

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def step(self) -> int:
        """The last known number of committed steps, from which a resumed loop continues."""
        return self._state.step

    @property
    def state(self) -> ModelState:
        """The state at the last answer of the server."""
        return self._state

    async def refresh(self) -> ModelState:
        """Fetches the current state, since other programs may train the model too."""
        self._state = await self.connection.state()
        return self._state

    async def train(self, groups: Sequence[Group]) -> TrainedSubmission:
        """Trains one step on these groups by the recipe, and returns when the step is committed.

        Groups that are submitted again, for example after a lost answer, are not trained again: the
        call returns the result of their step. Failed attempts and attempts older than
        `rollout.staleness` are left out; `dropped` lists them with the reasons. Raises ConfigError
        if only some of the groups were trained on before, or if a group has no completed attempt.
        Raises SealError for tokens that the engine did not sample.
        """
        group_list = list(groups)
        if not group_list or not all(isinstance(group, Group) for group in group_list):
            raise ConfigError("train: give the groups that gather returned, at least one")
        trained = await self.connection.train(group_list)
        step = max(self._state.step, trained.step)
        self._state = msgspec.structs.replace(self._state, step=step)
        return trained

    async def save(self) -> None:
        """Saves a checkpoint of the committed weights, unless a checkpoint already has them."""
        await self.connection.save()

    async def checkpoints(self) -> list[Checkpoint]:
        """The saved versions, oldest first; `checkpoint.keep_last` says how many are kept."""
        return await self.connection.checkpoints()

    async def fetch(self, to: str | Path, *, step: int | Literal["last"] = "last") -> Path:
        """Copies a checkpoint into the new folder `to`, completely or not at all, and checks every
        byte of it. `last` saves the present weights first. Raises UnusableCheckpointError if the
        step has no checkpoint."""
        target = Path(to)
        if await in_thread(target.exists):
            raise ConfigError(f"{target} already exists: give the name of a new folder")
        if step == "last":
            await self.save()

        saved = {checkpoint.step: checkpoint for checkpoint in await self.checkpoints()}
        wanted_step = max(saved, default=None) if step == "last" else step
        if wanted_step is None or wanted_step not in saved:
            steps = ", ".join(map(str, saved)) or "none"
            raise UnusableCheckpointError(
                f"there is no checkpoint of step {step}, only of: {steps}"
            )

        limit = asyncio.Semaphore(MAX_PARALLEL_FETCHES)

        async def fetch(name: str, folder: Path) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            async with limit:
                await self.connection.fetch(saved[wanted_step], name, path)

        with atomic_folder(target) as folder:
            await asyncio.gather(*(fetch(name, folder) for name in saved[wanted_step].files))
            await in_thread(manifest.verify, folder)

        return target

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A place among the attempts that may run at once."""
        async with self._slots:
            yield
