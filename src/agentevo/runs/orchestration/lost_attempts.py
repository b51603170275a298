"""Attempts that no trainer will train on, found in the store: samplers may be other processes, and
the store is the only channel from them.

An attempt that failed or was cancelled is counted. A task that was set aside (`poison`: the
infrastructure failed it repeatedly; `failed`: its group could not be stored) is reported with its
error. If no other attempt arrives, waiting is useless: TrainingError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agentevo.config import RunConfig
from agentevo.config.named_agents import by_rank
from agentevo.errors import TrainingError
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import StoredTask, TaskState, TrajectorySummary
from agentevo.store.store import Store
from agentevo.types import Status

SET_ASIDE: tuple[TaskState, ...] = ("poison", "failed")
"""States of tasks that will never have a group."""
IN_VAIN_STEPS = 3
"""The number of steps' worth of attempts that may fail in a row, or of tasks that may be set aside,
while one step waits."""
PAGE = 64
_AGAIN = (
    "after you fixed the cause, `agentevo store RUN retry` queues such tasks again, and --resume "
    "continues"
)
_GOES_ON = (
    "after you fixed the cause, the same command with --resume continues (`agentevo learn`: "
    "without it)"
)


class LostAttempts:
    """See the module. `note` reports each task that is set aside once, and again if it was queued
    again in between."""

    def __init__(self, config: RunConfig, store: Store, note: Callable[[str], None]) -> None:
        self._config = config
        self._store = store
        self._note = note
        self._counts = Counter[str]()
        self._newest: dict[Status, str | None] = {}
        """Status -> id of the newest trajectory that is counted; None before there is one."""
        self._before: str | None = None
        """Id of the newest training attempt of an earlier life."""
        self._noted: set[str] | None = None
        """Tasks that are set aside; None before the first look, which finds those of earlier
        lives."""
        self._since_round = 0
        """Tasks that were set aside since the last round of attempts."""
        self._last = ""

    def stats(self) -> dict[str, float]:
        """Counts since the first look, under the names of a sampler's own counters."""
        names = ("attempts_failed", "attempts_cancelled", "cancelled_tokens", "tasks_set_aside")
        return {f"sampler/{name}": float(self._counts[name]) for name in names}

    async def look(self) -> None:
        """Counts and reports new ones."""
        await with_retries(self._look, within_s=STORE_RETRY_S, what="looking after attempts")

    def round_ended(self) -> None:
        """Called when attempts have arrived: the tasks that were set aside so far did not stop the
        run."""
        self._since_round = 0

    async def check(self) -> None:
        """Does what `look` does, for a step that waits. Raises TrainingError when attempt after
        attempt fails, or task after task is set aside."""
        await self.look()
        if self._since_round >= IN_VAIN_STEPS * self._config.trainer.groups_per_step:
            raise TrainingError(
                f"{self._since_round} tasks were set aside while a step waited for attempts, the "
                f"last {self._last}; {_AGAIN}"
            )

        await with_retries(
            self._check_failed, within_s=STORE_RETRY_S, what="looking after attempts"
        )

    async def set_aside(self, names: Sequence[str]) -> list[StoredTask]:
        """The tasks among `names` that will never have a group."""
        chosen = set(names)
        return [stored for stored in await self._all_set_aside() if stored.task.id in chosen]

    async def _all_set_aside(self) -> list[StoredTask]:
        return [stored for state in SET_ASIDE async for stored in self._store.tasks(state=state)]

    async def _look(self) -> None:
        if self._noted is None:
            newest = await self._store.summaries(split="train", newest_first=True, limit=1)
            self._before = newest[0].id if newest else None

        for status in ("failed", "cancelled"):
            new = await self._new(status)
            self._counts[f"attempts_{status}"] += len(new)
            if status == "cancelled":
                self._counts["cancelled_tokens"] += sum(
                    attempt.num_completion_tokens for attempt in new
                )

        aside = await self._all_set_aside()
        first = self._noted is None
        noted = self._noted or set()
        new_tasks = [stored for stored in aside if stored.task.id not in noted]
        self._noted = {stored.task.id for stored in aside}

        if not new_tasks:
            return

        self._last = f"{new_tasks[-1].task.id!r} with: {new_tasks[-1].error}"
        many = "1 task was" if len(new_tasks) == 1 else f"{len(new_tasks)} tasks were"
        self._note(f"{many} set aside and will not be trained on, the last {self._last}")

        if not first:
            self._counts["tasks_set_aside"] += len(new_tasks)
            self._since_round += len(new_tasks)

    async def _new(self, status: Status) -> list[TrajectorySummary]:
        """Training attempts with that status that were written since the last look, newest first;
        none at the first look."""
        limit = PAGE
        while True:
            page = await self._store.summaries(
                split="train", status=status, newest_first=True, limit=limit
            )
            ids = [attempt.id for attempt in page]
            if status not in self._newest:
                self._newest[status] = ids[0] if ids else None
                return []

            last_seen = self._newest[status]
            if last_seen not in ids and len(page) == limit:
                limit *= 4
                continue

            self._newest[status] = ids[0] if ids else None
            return page[: ids.index(last_seen)] if last_seen in ids else page

    async def _check_failed(self) -> None:
        trainer = self._config.trainer
        agents = by_rank(self._config) or ("",)
        limit = IN_VAIN_STEPS * trainer.groups_per_step * trainer.group_size * len(agents)
        newest = await self._store.summaries(split="train", limit=limit, newest_first=True)
        if (
            len(newest) == limit
            and all(attempt.status == "failed" for attempt in newest)
            and self._before not in [attempt.id for attempt in newest]
        ):
            raise TrainingError(
                f"the last {limit} attempts have all failed, the newest with: {newest[0].error}; "
                f"{_GOES_ON}"
            )


def in_vain(step: int, aside: Sequence[StoredTask]) -> TrainingError:
    """The error for a step whose tasks were all set aside."""
    return TrainingError(
        f"step {step}: all of its {len(aside)} tasks were set aside, {aside[-1].task.id!r} with: "
        f"{aside[-1].error}; {_AGAIN}"
    )
