"""Uses the run's engines in other processes instead of an engine in the trainer's process. A
trainer whose model is split over several processes evaluates with these engines, so that no process
needs the whole model.

Weights reach these engines in the same way as for sampling. This module only sets the required
version, and requests wait until an engine serves it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from agentevo.config import RunConfig
from agentevo.errors import EngineUnavailableError
from agentevo.inference.engine import InFlight, TokenListener, TokenScores, Weights
from agentevo.inference.serving.announcements import AnnouncementWatcher
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

POLL_INTERVAL_S = 1.0
NOTICE_S = 10.0
"""The waiting time after which a message names the missing version, in seconds."""


class RunEngines:
    """An UpdatableEngine that passes requests to the run's engines. Used from one event loop."""

    def __init__(self, config: RunConfig) -> None:
        directory = EngineDirectory(config.run_dir / "engines")
        self._place = directory.folder
        self._poll_s = config.rollout.poll_s
        secret = RunSecret(directory.folder, config.rollout.engine_secret)
        self._engines = RemoteEngine(
            directory,
            also=config.rollout.engine_urls,
            watcher=AnnouncementWatcher.of(config, secret),
            secret=secret,
            poll_s=config.rollout.poll_s,
        )

        self._required_version = 0
        self._repair: Callable[[], Awaitable[None]] | None = None

    @property
    def version(self) -> int:
        """See Engine.version."""
        return self._engines.version

    def repair_with(self, repair: Callable[[], Awaitable[None]]) -> None:
        """Sets the function that restores a version's lost files (WeightSender.look_after). It is
        called every POLL_INTERVAL_S while requests wait for the version."""
        self._repair = repair

    async def reach(
        self, version: int, stop: Callable[[], bool], note: Callable[[str], None]
    ) -> None:
        """Waits until the engines serve the version, or a newer one, or until `stop` returns
        True."""
        started_at = time.monotonic()
        has_noted = False
        repaired_at = started_at
        await self._engines.refresh()

        while self._engines.version < version and not stop():
            if not has_noted and time.monotonic() - started_at > NOTICE_S:
                note(
                    f"waiting for an engine with version {version}: is `agentevo serve` running "
                    f"and announced in {self._place}?"
                )
                has_noted = True

            if self._repair is not None and time.monotonic() - repaired_at > POLL_INTERVAL_S:
                await self._repair()
                repaired_at = time.monotonic()

            await asyncio.sleep(self._poll_s)

    @asynccontextmanager
    async def with_repairs(self) -> AsyncIterator[None]:
        """During the block, repairs the version and sends it to engines that need it. After the
        block, nothing reads the trainer's weights."""
        is_done = asyncio.Event()
        repairing = asyncio.create_task(self._repair_until(is_done))
        try:
            yield
        finally:
            is_done.set()
            await repairing

    async def _repair_until(self, is_done: asyncio.Event) -> None:
        while not is_done.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(is_done.wait(), POLL_INTERVAL_S)
            if self._repair is not None and not is_done.is_set():
                await self._repair()

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """See UpdatableEngine.begin."""
        self._required_version = version

    def verify(self, weights: Weights) -> Weights:
        """See UpdatableEngine.verify. Checks nothing: the engines check what they read."""
        return weights

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
    ) -> None:
        """See UpdatableEngine.publish."""
        self._required_version = version

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See RemoteEngine.generate."""
        remaining_s = await self._wait_for_version(deadline_s)
        return await self._engines.generate(
            prompt_ids,
            sampling,
            session=session,
            deadline_s=remaining_s,
            listen=listen,
            images=images,
        )

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See RemoteEngine.score."""
        remaining_s = await self._wait_for_version(deadline_s)
        return await self._engines.score(
            context_ids, ids, temperature=temperature, deadline_s=remaining_s, images=images
        )

    async def _wait_for_version(self, deadline_s: float) -> float:
        """Waits for the required version. Returns the remaining seconds."""
        deadline = time.monotonic() + deadline_s
        if self._engines.version < self._required_version:
            await self._engines.refresh()

        while self._engines.version < self._required_version:
            if time.monotonic() > deadline:
                raise EngineUnavailableError(
                    f"no engine has had version {self._required_version} within {deadline_s:g} s "
                    f"(the oldest serves {self._engines.version}): see the log of `agentevo serve`"
                )
            await asyncio.sleep(self._poll_s)

        return max(deadline - time.monotonic(), self._poll_s)

    async def release(self, session: str) -> None:
        """See Engine.release."""
        await self._engines.release(session)

    def stats(self) -> dict[str, float]:
        """See RemoteEngine.stats."""
        return self._engines.stats()

    async def forget_cache(self) -> None:
        """See UpdatableEngine.forget_cache. Does nothing: the caches are in other processes."""

    def check(self) -> None:
        """See UpdatableEngine.check. Never raises: engines may return at any time."""

    async def close(self) -> None:
        """See UpdatableEngine.close."""
        await self._engines.close()
