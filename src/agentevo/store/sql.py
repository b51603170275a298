"""The common part of the SQL stores: every call of `Store` is one transaction around functions of
queries, leases and ledger. A backend defines how it runs a transaction, its locks and its clock.
`work` awaits only its connection, so a backend with a blocking driver can run all of it in one
thread.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, Unpack

import msgspec
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import (
    SHOWN,
    DeadlineExceededError,
    StoreError,
    StoreUnavailableError,
    UnusableStoreError,
    storable,
)
from agentevo.runtime.event_loop import in_thread
from agentevo.store import call_rows, leases, ledger, queries, rules
from agentevo.store.calls import NEVER_SEEN, CallState, StoredCall, check_recorder, encode_call
from agentevo.store.clock import Now
from agentevo.store.codec import (
    encode_record,
    encode_step,
    encode_stored,
    encode_stored_task,
    encode_task,
    encode_trajectories,
)
from agentevo.store.records import (
    Lease,
    RetryPolicy,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskState,
    TrajectoryFilter,
    TrajectorySummary,
    checked_filters,
)
from agentevo.store.store import AWAY_S, NONE_DROPPED
from agentevo.store.streams import Streaming
from agentevo.types import Call, Task, Trajectory

Lock = Literal["worker", "trainer", "alone"]
"""The role in which a call writes: as one of any number of workers, as the single trainer next to
them, or alone. (SQLite has a single writer anyway.)"""

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]


class SQLStore(Streaming):
    """`Store` describes the guarantees of the methods."""

    def __init__(self, where: str, *, timeout_s: float, retries: RetryPolicy) -> None:
        self.where = where
        self._timeout_s = timeout_s
        self._away_s = min(timeout_s, AWAY_S)
        self._retries = retries

    @abstractmethod
    async def _run(
        self, what: str, work: Work[T], *, write: bool = False, lock: Lock = "worker"
    ) -> T:
        """Runs `work` in a transaction, within the deadline. `what` names the call in messages."""

    @abstractmethod
    async def _now(self, connection: AsyncConnection) -> Now: ...

    @abstractmethod
    def _is_late(self, error: BaseException) -> bool:
        """Whether the database reports that the call took too long."""

    @abstractmethod
    def _is_unreachable(self, error: BaseException) -> bool:
        """Whether the database can't be reached now."""

    def _is_damaged(self, error: BaseException) -> bool:
        """Whether the database reports that it is damaged."""
        return False

    @abstractmethod
    async def size_bytes(self) -> int: ...

    @abstractmethod
    async def _vacuum(self) -> None: ...

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[list[BaseException]]:
        """Converts the database's failures to AgentEvo's errors. No other code does. Yields a list
        for the failures that were retried."""
        retried_errors: list[BaseException] = []
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                yield retried_errors
        except TimeoutError as error:
            if retried_errors and self._is_unreachable(retried_errors[-1]):
                raise self._unavailable(what, retried_errors[-1]) from retried_errors[-1]
            raise self._timeout_error(what, started_at) from error
        except (DBAPIError, OSError, UnicodeDecodeError) as error:
            if self._is_late(error):
                raise self._timeout_error(what, started_at) from error
            if self._is_unreachable(error):
                raise self._unavailable(what, error) from error

            reason = getattr(error, "orig", None) or error
            if self._is_damaged(error):
                raise UnusableStoreError(
                    f"the store {self.where} is damaged ({what}: {storable(str(reason), SHOWN)}): "
                    "restore it from a copy"
                ) from error

            raise StoreError(f"store {self.where}: {what}: {reason}") from error

    def _unavailable(self, what: str, error: BaseException) -> StoreUnavailableError:
        reason = getattr(error, "orig", None) or error
        return StoreUnavailableError(
            f"store {self.where}: {what}: {reason}: the database can't be used now; you can safely "
            f"repeat the call"
        )

    def _timeout_error(self, what: str, started_at: float) -> DeadlineExceededError:
        waited_s = time.monotonic() - started_at
        limit_s = self._away_s if waited_s < 2 * self._away_s else self._timeout_s
        return DeadlineExceededError(
            f"store {self.where}: {what}: no answer within {limit_s:g} s; another process may "
            f"hold the write lock, the disk may be slow, or the server down; you can safely "
            f"repeat the call"
        )

    async def add_tasks(self, tasks: Iterable[Task], *, queue: bool = True) -> int:
        encoded = [encode_task(task) for task in tasks]
        return await self._run(
            "add_tasks",
            lambda connection: queries.insert_tasks(connection, encoded, queue=queue),
            write=True,
        )

    async def _numbered_task(self, task_id: str) -> tuple[int, StoredTask]:
        return await self._run("task", lambda connection: queries.read_task(connection, task_id))

    async def _task_page(
        self, state: TaskState | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        return await self._run(
            "tasks",
            lambda connection: queries.read_tasks(connection, state, after=after, limit=limit),
        )

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        async def work(connection: AsyncConnection) -> list[Lease]:
            now = await self._now(connection)
            return await leases.lease_tasks(
                connection, worker, now=now, lease_s=lease_s, limit=limit, retries=self._retries
            )

        return await self._run("lease_tasks", work, write=True)

    async def renew(self, lease: Lease, *, lease_s: float | None = None) -> Lease:
        length = lease.lease_s if lease_s is None else lease_s

        async def work(connection: AsyncConnection) -> float:
            return await leases.renew(
                connection, lease, now=await self._now(connection), lease_s=length
            )

        return msgspec.structs.replace(
            lease, lease_s=length, expires_at=await self._run("renew", work, write=True)
        )

    async def complete_task(self, lease: Lease) -> None:
        async def work(connection: AsyncConnection) -> None:
            await leases.finish(connection, lease, error=None, now=await self._now(connection))

        await self._run("complete_task", work, write=True)

    async def fail_task(self, lease: Lease, error: str) -> None:
        async def work(connection: AsyncConnection) -> None:
            await leases.finish(connection, lease, error=error, now=await self._now(connection))

        await self._run("fail_task", work, write=True)

    async def retry_task(self, lease: Lease, error: str) -> TaskState:
        async def work(connection: AsyncConnection) -> TaskState:
            return await leases.retry(
                connection, lease, error, now=await self._now(connection), retries=self._retries
            )

        return await self._run("retry_task", work, write=True)

    async def return_task(self, lease: Lease) -> None:
        await self._run(
            "return_task", lambda connection: leases.give_back(connection, lease), write=True
        )

    async def queue_again(self) -> int:
        return await self._run("queue_again", leases.queue_again, write=True)

    async def write_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        split: Split,
        step: int,
        lease: Lease | None = None,
    ) -> int:
        encoded = await in_thread(encode_trajectories, list(trajectories), split, step)

        async def work(connection: AsyncConnection) -> int:
            now = await self._now(connection)
            if lease is not None:
                await leases.finish(connection, lease, error=None, now=now)
            return await queries.insert_trajectories(connection, encoded, now.wall)

        return await self._run("write_trajectories", work, write=True)

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        names = list(ids)
        return await self._run(
            "reserve",
            lambda connection: ledger.reserve(connection, names, step),
            write=True,
            lock="trainer",
        )

    async def commit_step(
        self,
        step: int,
        record: dict[str, Any],
        *,
        ids: Iterable[str] | None = None,
        dropped: Mapping[str, Sequence[str]] = NONE_DROPPED,
    ) -> int:
        text = encode_record(step, record)
        names = None if ids is None else list(ids)

        async def work(connection: AsyncConnection) -> int:
            now = (await self._now(connection)).wall
            return await ledger.commit_step(
                connection, step, text, ids=names, dropped=dropped, now=now
            )

        return await self._run("commit_step", work, write=True, lock="trainer")

    async def release(self, step: int | None = None) -> int:
        return await self._run(
            "release",
            lambda connection: ledger.release(connection, step),
            write=True,
            lock="trainer",
        )

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        names = list(ids)
        return await self._run(
            "drop",
            lambda connection: ledger.drop(connection, names, reason),
            write=True,
            lock="trainer",
        )

    async def rewind(self, step: int, *, keep: bool = False) -> int:
        return await self._run(
            "rewind",
            lambda connection: ledger.rewind(connection, step, keep=keep),
            write=True,
            lock="alone",
        )

    async def _newest_seq(self) -> int:
        return await self._run("trajectories", queries.newest_seq)

    async def _page(
        self,
        properties: Mapping[str, object],
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredTrajectory]]:
        def work(connection: AsyncConnection) -> Awaitable[list[tuple[int, StoredTrajectory]]]:
            return queries.read_page(
                connection, properties, seqs=seqs, limit=limit, newest_first=newest_first
            )

        return await self._run("trajectories", work)

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]:
        properties, limit, newest = checked_filters(filters)

        def work(connection: AsyncConnection) -> Awaitable[list[TrajectorySummary]]:
            return queries.read_summaries(connection, properties, limit=limit, newest_first=newest)

        return await self._run("summaries", work)

    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]:
        return await self._run(
            "summaries",
            lambda connection: queries.read_numbered_summaries(connection, seqs, limit=limit),
        )

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        rules.check_group(split, size, limit)
        return await self._run(
            "ready_groups",
            lambda connection: queries.ready_groups(connection, split, size=size, limit=limit),
        )

    async def outstanding(self, split: Split) -> int:
        rules.check_split(split)
        return await self._run(
            "outstanding", lambda connection: queries.outstanding(connection, split)
        )

    async def steps(
        self, *, after: int | None = None, limit: int | None = None
    ) -> list[StepRecord]:
        return await self._run(
            "steps", lambda connection: ledger.read_steps(connection, after=after, limit=limit)
        )

    async def last_step(self) -> StepRecord | None:
        return next(
            iter(
                await self._run(
                    "last_step", lambda connection: ledger.read_steps(connection, last_only=True)
                )
            ),
            None,
        )

    async def counts(self) -> dict[str, int]:
        return await self._run("counts", queries.count)

    async def write_calls(self, calls: Iterable[Call]) -> None:
        new_calls = list(calls)

        async def work(connection: AsyncConnection) -> None:
            now = await self._now(connection)
            rows = [encode_call(call, now.steady) for call in new_calls]
            await call_rows.upsert(connection, rows)

        if new_calls:
            await self._run("write_calls", work, write=True)

    async def renew_calls(self, recorder: str) -> None:
        check_recorder(recorder)

        async def work(connection: AsyncConnection) -> None:
            await call_rows.renew(connection, recorder, await self._now(connection))

        await self._run("renew_calls", work, write=True)

    async def _newest_call_seq(self) -> int:
        return await self._run("calls", call_rows.newest_seq)

    async def _call_page(
        self,
        trajectory_id: str | None,
        state: CallState | None,
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredCall]]:
        async def work(connection: AsyncConnection) -> list[tuple[int, StoredCall]]:
            return await call_rows.read_page(
                connection,
                trajectory_id,
                state,
                seqs=seqs,
                limit=limit,
                newest_first=newest_first,
                now=await self._now(connection),
            )

        return await self._run("calls", work)

    async def num_calls(self) -> int:
        return await self._run("num_calls", call_rows.count)

    async def put(
        self,
        *,
        tasks: Iterable[StoredTask] = (),
        trajectories: Iterable[StoredTrajectory] = (),
        steps: Iterable[StepRecord] = (),
        calls: Iterable[Call] = (),
    ) -> int:
        encoded_tasks = [encode_stored_task(stored) for stored in tasks]
        encoded = await in_thread(lambda: [encode_stored(stored) for stored in trajectories])
        new_steps = [encode_step(step) for step in steps]
        call_list = [encode_call(call, NEVER_SEEN) for call in calls]

        async def work(connection: AsyncConnection) -> int:
            new = await queries.insert_tasks(connection, encoded_tasks) if encoded_tasks else 0
            new += await queries.insert_trajectories(connection, encoded, 0.0) if encoded else 0
            new += await call_rows.insert_new(connection, call_list) if call_list else 0
            return new + (await queries.insert_steps(connection, new_steps) if new_steps else 0)

        return await self._run("put", work, write=True, lock="alone")

    async def gc(self, *, dropped: bool = False, lease_grace_s: float = 3600.0) -> dict[str, int]:
        before = await self.size_bytes()

        async def work(connection: AsyncConnection) -> dict[str, int]:
            now = await self._now(connection)
            return {
                "leases": await leases.requeue_old(connection, now.steady - lease_grace_s),
                "orphans": await ledger.delete_orphans(connection),
                "tokens": await ledger.delete_dropped_tokens(connection) if dropped else 0,
                "calls": await call_rows.delete_abandoned(connection, now, lease_grace_s)
                + (await call_rows.delete_of_emptied(connection) if dropped else 0),
            }

        done = await self._run("gc", work, write=True, lock="alone")
        async with self._deadline("gc"):
            await self._vacuum()

        return done | {"bytes": before - await self.size_bytes()}

    async def clear(self) -> int:
        return await self._run("clear", ledger.clear, write=True, lock="alone")
