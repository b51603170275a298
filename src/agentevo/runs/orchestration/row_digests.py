"""Digests of rows that no plan holds, in the records of steps and therefore in their chain: tasks
that were played, attempts on which a step has not trained, and attempts that evaluated the policy.

    record["rows"] = {"tasks": {id: digest}, "untrained": {id: digest}, "evaluated": {id: digest}}

Each row also has its own digest, but a program that changes the row can compute that again. It
can't do so with these.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentevo.errors import StoreError, StoreUnavailableError
from agentevo.runs.folder.chain import RecordedRows
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.codec import content_digest
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import SHOWN
from agentevo.types import Trajectory


class RowDigests:
    """The row digests of one step after another, of a run's trainer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recorded_tasks: set[str] = set()
        """Tasks that earlier records hold."""

    async def of_step(
        self, step: int, sampled: Iterable[Trajectory], trained: Iterable[str]
    ) -> RecordedRows:
        """The rows that the record of a step holds: of the attempts `sampled` those that are not
        `trained` (ids), and the evaluations since the previous record."""
        ids = set(trained)
        attempts = {trajectory.id: trajectory for trajectory in sampled}
        evaluated = await self._read_evaluations(step)
        if step == 1:
            evaluated += await self._read_evaluations(0)
        tasks = {trajectory.task_id for trajectory in (*attempts.values(), *evaluated)}
        return RecordedRows(
            tasks=await self._tasks(tasks - self._recorded_tasks),
            untrained={name: _shown(attempts[name]) for name in attempts.keys() - ids},
            evaluated={trajectory.id: _shown(trajectory) for trajectory in evaluated},
        )

    async def _read_evaluations(self, step: int) -> list[Trajectory]:
        """The attempts that evaluated the policy after a step."""

        async def read() -> list[Trajectory]:
            rows = self._store.trajectories(step=step, split="eval")
            return [row.trajectory async for row in rows if not row.tokens_deleted]

        return await with_retries(
            read, within_s=STORE_RETRY_S, what="reading the attempts of evaluations"
        )

    async def _tasks(self, names: Iterable[str]) -> dict[str, str]:
        async def read() -> dict[str, str]:
            digests = {}
            for name in sorted(names):
                try:
                    digests[name] = (await self._store.stored_task(name)).digest.hex()[:SHOWN]
                except StoreUnavailableError:
                    raise
                except StoreError:  # samplers in other processes may have added none
                    continue
            return digests

        digests = await with_retries(read, within_s=STORE_RETRY_S, what="reading the tasks")
        self._recorded_tasks.update(digests)
        return digests


def _shown(trajectory: Trajectory) -> str:
    return content_digest(trajectory).hex()[:SHOWN]
