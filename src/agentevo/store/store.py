"""The store: append-only facts (tasks, trajectories, steps) and a ledger with the state of each of
them.

    task         queued -> leased -> completed
                 leased -> failed     fail_task: the attempt itself failed, which is a result leased
                 -> queued     retry_task: the infrastructure failed; the task waits for a
                                      back-off. return_task: the worker stops
                 leased -> leased     when the lease ran out: the task gets a new fencing id, and
                                      the holder of the old one is refused
                 leased -> poison     instead of the two above, at the bounds of RetryPolicy: the
                                      task is set aside with its error and its history
                 poison, failed -> queued     queue_again
    trajectory   ready -> reserved(step) -> committed(step)
                 reserved -> ready    release: the step never happened
                 ready, reserved -> dropped(reason)
                 failed               from the start, for attempts that failed or were cancelled:
                                      they are never trained on

Invariants. (1) A trajectory is committed to at most one step, in the transaction that writes the
step's record. (2) Only trajectories of the split `train` can be reserved. (3) Every call takes
effect whole or not at all, and repeating a call changes nothing. So after `DeadlineExceededError`
or `StoreUnavailableError` a caller may repeat its call. (`lease_task` then leaves a lease that
expires. `write_calls` of many calls, and on MongoDB `gc` and `clear`, run in pieces, and the second
call completes them.) (4) A record reads back as it was written, except that log-probs are rounded
to float32.

Only `rewind` deletes facts: it undoes steps whose weights were lost by a resume from an older
checkpoint. `clear` deletes all facts.

All holders of leases share a clock that no process sets (clock.py). No lease has more time left
than its own length, and no task waits longer than RetryPolicy's longest delay, even if a clock
jumps.

A store object belongs to one event loop. Any number of processes may open the same store.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, TypedDict, TypeVar, Unpack

import msgspec

from agentevo.errors import (
    SHOWN,
    DeadlineExceededError,
    StoreError,
    StoreUnavailableError,
    UnusableStoreError,
    storable,
)
from agentevo.runtime.credentials import with_environment, without_password
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.registry import Registry
from agentevo.store import rules
from agentevo.store.calls import (
    NEVER_SEEN,
    CallFilter,
    StoredCall,
    check_recorder,
    checked_call_filters,
    encode_call,
)
from agentevo.store.clock import Clock
from agentevo.store.codec import (
    encode_record,
    encode_step,
    encode_stored,
    encode_stored_task,
    encode_task,
    encode_trajectories,
)
from agentevo.store.records import (
    RETRIES,
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
from agentevo.store.rows import Condition, Rows, within
from agentevo.types import Call, Task, Trajectory

AWAY_S = 60.0
"""The maximum time in seconds that a call waits for a database that can't be reached or for another
process's lock. The call's deadline may be longer, because its work may take long."""
PAGE = 64
"""The number of rows that a query reads while streaming."""
CALL_PAGE = 500
NONE_DROPPED: Mapping[str, Sequence[str]] = MappingProxyType({})
TABLES = ("calls", "tokens", "trajectories", "tasks", "steps")
"""The tables in the order in which their rows can be deleted."""
_PAUSE_S = 0.02
"""The shortest time between two tries of a transaction, in seconds."""
CALLS_AT_ONCE = 200
"""The largest number of calls in a transaction, so that no other writer waits long for it."""

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""What a transaction does with its `Rows`."""
Piece = Callable[[Any, Any], Awaitable[tuple[int, Any]]]
"""Deletes or changes some rows, after a place in their order (at first None). Returns their number,
and the place after which to continue, or None at the end."""
Role = Literal["reader", "worker", "trainer", "alone"]
"""The role in which a call accesses the store. A reader changes nothing. A call writes as one of
any number of workers, as the single trainer next to them, or alone."""


class Store(ABC):
    """The operations of every backend. All calls raise `StoreError` for refusals,
    `StoreUnavailableError` (a subclass) while the database can't be reached, and
    `DeadlineExceededError` when the database is too slow.

    Every call is a transaction. A backend defines how it runs a transaction, its `Rows`, and what
    the errors of its driver mean.
    """

    _errors: tuple[type[Exception], ...]
    """The errors of the driver."""

    def __init__(
        self,
        where: str,
        *,
        timeout_s: float = 60.0,
        retries: RetryPolicy = RETRIES,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> None:
        self.where = where
        """The name of the store in messages."""
        self._timeout_s = timeout_s
        self._away_s = min(timeout_s, AWAY_S)
        self._retries = retries
        self._clock = clock
        self._read_only = read_only
        self._is_open = False

    @abstractmethod
    async def _transact(self, work: Work[T], role: Role) -> T:
        """Runs `work` in a transaction, which takes effect completely or not at all."""

    @abstractmethod
    async def _run_pieces(self, what: str, pieces: Mapping[str, Piece]) -> dict[str, int]:
        """Runs each piece until its end, and returns the sums of the numbers of rows."""

    @abstractmethod
    async def _vacuum(self) -> None:
        """Returns the space of deleted rows to the disk, if the database can."""

    def _is_late(self, error: BaseException) -> bool:
        """Whether the database reports that the call took too long."""
        return False

    @abstractmethod
    def _is_unreachable(self, error: BaseException) -> bool:
        """Whether the database can't be reached now."""

    def _is_damaged(self, error: BaseException) -> bool:
        """Whether the database reports that it is damaged."""
        return False

    def _is_transient(self, error: BaseException) -> bool:
        """Whether the same call may succeed soon."""
        return False

    async def _run(self, what: str, work: Work[T], role: Role = "reader") -> T:
        """Runs a transaction within the deadline. `what` names the call in messages."""
        if role != "reader":
            self._check_writable(what)
        return await self._retry(what, lambda: self._transact(work, role))

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise StoreError(f"{what}: {self.where} was opened for reading only")

    async def _retry(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Repeats `work` while its errors are transient, until the deadline and for at most AWAY_S
        seconds."""
        first_error_at: float | None = None
        async with self._deadline(what) as retried_errors:
            while True:
                try:
                    return await work()
                except self._errors as error:
                    now = time.monotonic()
                    first_error_at = now if first_error_at is None else first_error_at
                    if not self._is_transient(error) or now - first_error_at > self._away_s:
                        raise
                    retried_errors[:] = [error]

                await asyncio.sleep(_PAUSE_S * (1.0 + random.random()))

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[list[Exception]]:
        """Converts the database's failures to AgentEvo's errors. No other code does. Yields a list
        for the failures that were retried."""
        retried_errors: list[Exception] = []
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                yield retried_errors
        except TimeoutError as error:
            if retried_errors and self._is_unreachable(retried_errors[-1]):
                raise self._unavailable(what, retried_errors[-1]) from retried_errors[-1]
            raise self._timeout_error(what, started_at) from error
        except self._errors as error:
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

    async def _pages(
        self,
        table: str,
        page: Callable[[range | None, int], Awaitable[list[tuple[int, T]]]],
        size: int,
        limit: int | None,
        newest_first: bool,
    ) -> AsyncIterator[T]:
        """At most `limit` rows in the order of seq, page by page. Rows that are written after the
        first page was read are left out."""
        remaining = limit
        seqs: range | None = None
        while remaining != 0 and (seqs is None or seqs):
            length = size if remaining is None else min(size, remaining)
            rows = await page(seqs, length)
            if seqs is None and len(rows) == length and not newest_first:
                newest = await self._run(table, lambda rows: rows.newest_seq(table))
                seqs = range(1, newest + 1)

            for _, row in rows:
                yield row

            if len(rows) < length:
                return

            last = rows[-1][0]
            if newest_first:
                seqs = range(1, last)
            else:
                seqs = range(last + 1, seqs.stop if seqs is not None else last + 1)

            remaining = None if remaining is None else remaining - len(rows)

    @abstractmethod
    async def close(self) -> None:
        """Closes connections and files. The object can't be used afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def add_tasks(self, tasks: Iterable[Task], *, queue: bool = True) -> int:
        """Queues tasks and returns the number of new ones. If a known id has other content, no task
        is queued.

        Without `queue`, tasks are completed from the start, for a caller that makes the attempts
        itself. No worker ever leases them. Known tasks that are queued become completed too. Known
        tasks in any other state keep it.
        """

        encoded = [encode_task(task) for task in tasks]
        return await self._run(
            "add_tasks", lambda rows: rows.insert_tasks(encoded, queue=queue), "worker"
        )

    async def task(self, task_id: str) -> Task:
        return (await self.stored_task(task_id)).task

    async def stored_task(self, task_id: str) -> StoredTask:
        return (await self._numbered_task(task_id))[1]

    async def _numbered_task(self, task_id: str) -> tuple[int, StoredTask]:
        """The task as (seq, task)."""
        return await self._run("task", lambda rows: rows.read_task(task_id))

    async def tasks(
        self, *, state: TaskState | None = None, after: str | None = None
    ) -> AsyncIterator[StoredTask]:
        """Streams tasks in the order in which they were added, starting behind task `after`."""
        seq = 0 if after is None else (await self._numbered_task(after))[0]

        def work(rows: Rows) -> Awaitable[list[tuple[int, StoredTask]]]:
            return rows.read_tasks(state, after=seq, limit=PAGE)

        while page := await self._run("tasks", work):
            for _, stored in page:
                yield stored
            seq = page[-1][0]

    async def lease_task(self, worker: str, *, lease_s: float) -> Lease | None:
        """`lease_tasks` with a limit of one. None if no task is available."""
        return next(iter(await self.lease_tasks(worker, lease_s=lease_s, limit=1)), None)

    @abstractmethod
    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        """Leases up to `limit` tasks: first those with lost leases, then due retries, then the
        oldest queued tasks."""

    async def renew(self, lease: Lease, *, lease_s: float | None = None) -> Lease:
        """The heartbeat: from now on, the lease lasts `lease_s` more seconds (by default as many as
        before). Refused if the lease is lost."""
        length = lease.lease_s if lease_s is None else lease_s
        expires_at = await self._run("renew", lambda rows: rows.renew(lease, length), "worker")
        return msgspec.structs.replace(lease, lease_s=length, expires_at=expires_at)

    async def complete_task(self, lease: Lease) -> None:
        """Completes the task. Refused if the task was leased again in the meantime."""
        await self._run("complete_task", lambda rows: rows.finish(lease), "worker")

    async def fail_task(self, lease: Lease, error: str) -> None:
        """Fails the task, because another try would not help. Refused if the task was leased again
        in the meantime."""
        await self._run("fail_task", lambda rows: rows.finish(lease, error), "worker")

    async def retry_task(self, lease: Lease, error: str) -> TaskState:
        """Returns the task to the queue after a delay, or makes it poison, because the
        infrastructure failed. Returns "queued" or "poison". Refused if the task was leased again in
        the meantime."""
        return await self._run(
            "retry_task", lambda rows: rows.retry(lease, error, self._retries), "worker"
        )

    async def return_task(self, lease: Lease) -> None:
        """Returns the task to the queue at once and without counting a failure, because the worker
        stops. Refused if the task was leased again in the meantime."""
        await self._run("return_task", lambda rows: rows.give_back(lease), "worker")

    async def queue_again(self) -> int:
        """poison, failed -> queued, after the cause was fixed. Returns the number of tasks.
        Failures and expiries count from 0 again, and the history stays."""
        return await self._run("queue_again", lambda rows: rows.queue_again(), "worker")

    async def write_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        split: Split,
        step: int,
        lease: Lease | None = None,
    ) -> int:
        """Writes all trajectories or none, and returns the number of new ones. `step` is the step
        that they were sampled for.

        A known id with the same content (except the timings `started_at` and `duration_s`) changes
        nothing. A known id with other content is refused. With `lease`, the same transaction
        completes the task. A holder that has lost the lease writes nothing.
        """

        encoded = await in_thread(encode_trajectories, list(trajectories), split, step)

        async def work(rows: Rows) -> int:
            if lease is not None:
                await rows.finish(lease)
            return await rows.insert_trajectories(encoded, (await rows.now()).wall)

        return await self._run("write_trajectories", work, "worker")

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        """ready -> reserved(step), for all ids or none. Returns how many were newly reserved."""
        names = list(ids)
        return await self._run("reserve", lambda rows: rows.reserve(names, step), "trainer")

    async def commit_step(
        self,
        step: int,
        record: dict[str, Any],
        *,
        ids: Iterable[str] | None = None,
        dropped: Mapping[str, Sequence[str]] = NONE_DROPPED,
    ) -> int:
        """Records the step and changes every trajectory reserved for it to committed(step). Returns
        the number of trajectories. The same transaction drops the trajectories that the step leaves
        out: `dropped` maps a reason to ids, see `drop`.

        With `ids`, the call is refused unless exactly these ids are reserved for the step.
        Repeating the call with the same record changes nothing. A trainer that saves a checkpoint
        of the step writes the files first. Then it commits the checkpoint's identity in the same
        record, and so in the same transaction: `record["checkpoint"] = {"path": ..., "sha256":
        ...}`. A checkpoint that no record names is incomplete.
        """

        text = encode_record(step, record)
        names = None if ids is None else list(ids)
        return await self._run(
            "commit_step",
            lambda rows: rows.commit_step(step, text, ids=names, dropped=dropped),
            "trainer",
        )

    async def release(self, step: int | None = None) -> int:
        """reserved(step) -> ready, after a crash. None releases every reservation. Returns the
        number of trajectories."""
        return await self._run("release", lambda rows: rows.release(step), "trainer")

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        """ready or reserved -> dropped(reason). Returns the number of trajectories. Failed
        trajectories keep their own reason, and committed ones are refused."""
        names = list(ids)
        return await self._run("drop", lambda rows: rows.drop(names, reason), "trainer")

    async def rewind(self, step: int, *, keep: bool = False) -> int:
        """Returns the store to the moment when `step` was committed, to resume from its checkpoint.
        Returns the number of deleted trajectories.

        Later steps and all trajectories sampled for them are deleted: their weights are lost, so
        they could not be replayed. Earlier trajectories that were trained on in later steps become
        ready again. Tasks are queued again if they are leased, or if they lost their only
        trajectories and had some to train on. Late writers are refused.

        With `keep`, nothing is deleted and leases stay. Later steps lose their records and
        trajectories. Dropped trajectories that were sampled for later steps become ready again,
        unless `gc` has deleted their tokens. Returns the number of trajectories that became ready.
        """

        return await self._run("rewind", lambda rows: rows.rewind(step, keep=keep), "alone")

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        where: list[Condition] = [("id", "=", trajectory_id)]
        page = await self._run("trajectories", lambda rows: rows.read_page(where, limit=1))
        if not page:
            raise UnusableStoreError(f"no trajectory {trajectory_id!r} in {self.where}")

        stored: StoredTrajectory = page[0][1]
        if stored.tokens_deleted:
            raise UnusableStoreError(
                f"the turns of trajectory {trajectory_id!r} in {self.where} were deleted by "
                "`agentevo store RUN gc --dropped`"
            )

        trajectory: Trajectory = stored.trajectory
        return trajectory

    async def trajectories(
        self, **filters: Unpack[TrajectoryFilter]
    ) -> AsyncIterator[StoredTrajectory]:
        """Streams trajectories, without those that are written after the first one is read."""
        properties, limit, newest_first = checked_filters(filters)

        def page(seqs: range | None, size: int) -> Awaitable[list[tuple[int, StoredTrajectory]]]:
            where = _equal(properties) + within(seqs)
            return self._run(
                "trajectories",
                lambda rows: rows.read_page(where, limit=size, newest_first=newest_first),
            )

        async for stored in self._pages("trajectories", page, PAGE, limit, newest_first):
            yield stored

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]:
        properties, limit, newest_first = checked_filters(filters)

        def work(rows: Rows) -> Awaitable[list[tuple[int, TrajectorySummary]]]:
            return rows.read_summaries(_equal(properties), limit=limit, newest_first=newest_first)

        return [summary for _, summary in await self._run("summaries", work)]

    async def written(self, seqs: range, *, limit: int) -> list[tuple[int, StoredTrajectory]]:
        """At most `limit` of the trajectories whose numbers are in `seqs`, as (number, trajectory)
        in order. Numbers start at 1 and grow as rows are written. They may have gaps, and a number
        is used again only after a `rewind` or `clear`."""
        return await self._run(
            "trajectories", lambda rows: rows.read_page(within(seqs), limit=limit)
        )

    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]:
        return await self._run(
            "summaries", lambda rows: rows.read_summaries(within(seqs), limit=limit)
        )

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        """Ids of up to `limit` groups that can be trained on, in the order of their first ready
        members.

        Such a group has at least `size` members. At least one is ready, and none is reserved or
        committed. Failed, cancelled and dropped attempts count as members. Read the group with
        `trajectories(group_id=...)`. When none of its members is ready, it is no longer listed.
        """

        rules.check_group(split, size, limit)
        return await self._run(
            "ready_groups", lambda rows: rows.ready_groups(split, size=size, limit=limit)
        )

    async def outstanding(self, split: Split) -> int:
        """The number of outstanding tasks: those that are queued or leased, and those with a
        trajectory of `split` that is ready or reserved. The cost grows with the answer and not with
        the store."""
        rules.check_split(split)
        return await self._run("outstanding", lambda rows: rows.outstanding(split))

    async def steps(
        self, *, after: int | None = None, limit: int | None = None
    ) -> list[StepRecord]:
        """Committed steps in the order of their numbers, at most `limit`. With `after`, only those
        with larger numbers. The cost grows only with the answer."""
        return await self._run("steps", lambda rows: rows.read_steps(after=after, limit=limit))

    async def last_step(self) -> StepRecord | None:
        steps = await self._run("last_step", lambda rows: rows.read_steps(last_only=True))
        return steps[0] if steps else None

    async def counts(self) -> dict[str, int]:
        """`tasks/STATE`, `trajectories/SPLIT/STATE` for every split and state, `turns` and
        `steps`."""
        return await self._run("counts", lambda rows: rows.count_all())

    async def write_calls(self, calls: Iterable[Call]) -> None:
        """Writes calls that have started, or writes them again after they have ended. Calls without
        an end count as running for LOST_S seconds (calls.py). A transaction writes at most
        CALLS_AT_ONCE calls."""
        new_calls = list(calls)

        async def write(rows: Rows, piece: Sequence[Call]) -> None:
            now = (await rows.now()).steady
            await rows.write_calls([encode_call(call, now) for call in piece])

        for start in range(0, len(new_calls), CALLS_AT_ONCE):
            piece = new_calls[start : start + CALLS_AT_ONCE]
            await self._run("write_calls", partial(write, piece=piece), "worker")

    async def renew_calls(self, recorder: str) -> None:
        """Marks the calls of this recorder that have not ended as running for LOST_S more
        seconds."""
        check_recorder(recorder)
        await self._run("renew_calls", lambda rows: rows.renew_calls(recorder), "worker")

    async def calls(self, **filters: Unpack[CallFilter]) -> AsyncIterator[StoredCall]:
        """Streams calls, as `trajectories` streams trajectories."""
        trajectory_id, state, limit = checked_call_filters(filters)
        newest_first = bool(filters.get("newest_first"))

        def page(seqs: range | None, size: int) -> Awaitable[list[tuple[int, StoredCall]]]:
            return self._run(
                "calls",
                lambda rows: rows.read_calls(
                    trajectory_id, state, seqs=seqs, limit=size, newest_first=newest_first
                ),
            )

        async for stored in self._pages("calls", page, CALL_PAGE, limit, newest_first):
            yield stored

    async def num_calls(self) -> int:
        return await self._run("num_calls", lambda rows: rows.count("calls"))

    @abstractmethod
    async def size_bytes(self) -> int:
        """The size of the store in bytes on its server's or this machine's disk."""

    async def put(
        self,
        *,
        tasks: Iterable[StoredTask] = (),
        trajectories: Iterable[StoredTrajectory] = (),
        steps: Iterable[StepRecord] = (),
        calls: Iterable[Call] = (),
    ) -> int:
        """Imports rows with their places in the ledger, in this order. Returns the number of new
        rows. Content is compared as in a write, and known calls stay unchanged.

        Leases are not imported: a leased task is queued, and a running call is lost.
        """

        new_tasks = [encode_stored_task(stored) for stored in tasks]
        encoded = await in_thread(lambda: [encode_stored(stored) for stored in trajectories])
        new_steps = [encode_step(step) for step in steps]
        new_calls = [encode_call(call, NEVER_SEEN) for call in calls]

        async def work(rows: Rows) -> int:
            return (
                await rows.insert_tasks(new_tasks)
                + await rows.insert_trajectories(encoded, 0.0)
                + await rows.insert_calls(new_calls)
                + await rows.insert_steps(new_steps)
            )

        return await self._run("put", work, "alone")

    async def gc(self, *, dropped: bool = False, lease_grace_s: float = 3600.0) -> dict[str, int]:
        """Cleans the store. Tasks whose `leases` expired longer ago than the grace period are
        queued again. `orphans` (tokens without a trajectory) are deleted. So are the `calls` of
        attempts that started longer ago than the grace period and never became a trajectory.

        With `dropped`, the turns of dropped trajectories (`tokens`) and their calls are deleted
        too. Those that a resumed trainer may read stay: they were sampled for a step after the last
        committed one, or another attempt at their task is ready or reserved. Then the disk gets the
        space back (`bytes`: how much). Returns these numbers.
        """

        before = await self.size_bytes()

        async def requeue(rows: Rows, after: None) -> tuple[int, None]:
            return await rows.requeue_old((await rows.now()).steady - lease_grace_s), None

        pieces: dict[str, Piece] = {"leases": requeue, "orphans": Rows.delete_orphans}
        if dropped:
            pieces["tokens"] = Rows.delete_dropped_tokens
        pieces["calls"] = partial(Rows.delete_calls, grace_s=lease_grace_s, dropped=dropped)
        done = dict.fromkeys(("leases", "orphans", "tokens", "calls"), 0)
        done |= await self._run_pieces("gc", pieces)
        await self._vacuum()

        return done | {"bytes": before - await self.size_bytes()}

    async def clear(self) -> int:
        """Deletes all calls, tasks, trajectories and steps, for a run that replaces another.
        Returns how many tasks, trajectories and steps were deleted. No other process may use the
        store: a worker with an old lease could not be distinguished from a worker of the new
        run."""

        async def work(rows: Rows) -> int:
            counts = [await rows.delete(table) for table in TABLES]
            return sum(counts[2:])

        return await self._run("clear", work, "alone")


def older_schema(where: str, version: object) -> UnusableStoreError:
    """The error for a store of an older version that is open for reading only."""
    return UnusableStoreError(
        f"{where} has the schema {version} of an older AgentEvo, but it is open for reading only "
        f"here: `agentevo store URL|RUN_DIR migrate` updates it to this version"
    )


def _equal(properties: Mapping[str, object]) -> list[Condition]:
    return [(name, "=", value) for name, value in properties.items()]


class StoreOptions(TypedDict, total=False):
    """The options of `open_store` that are the same for every backend."""

    timeout_s: float
    retries: RetryPolicy
    clock: Clock | None
    read_only: bool


class StoreOpener(Protocol):
    """Opens a store of one kind. Registered under the scheme of its URL."""

    async def __call__(
        self, url: str, *, create: bool = True, **options: Unpack[StoreOptions]
    ) -> Store: ...


stores: Registry[StoreOpener] = Registry("stores")


SCHEMES = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "mongodb": "mongodb",
    "mongodb+srv": "mongodb",
}
"""Maps a URL's scheme to the module of this package that registers its opener. The module is
imported when it is needed."""


async def open_store(
    url: str,
    *,
    timeout_s: float = 60.0,
    create: bool = True,
    retries: RetryPolicy = RETRIES,
    clock: Clock | None = None,
    read_only: bool = False,
) -> Store:
    """Opens the store at `url`: `sqlite:///PATH`, `postgresql://USER@HOST/DATABASE?schema=NAME` or
    `mongodb://HOST/DATABASE`. Creates the store if needed, unless `create` is false.

    `${env:NAME}` in the URL is replaced by the environment variable. `timeout_s` is the deadline of
    each call on the store, this one included. A call waits for an unavailable database for at most
    AWAY_S seconds. `clock` replaces the store's own clock, for tests. `read_only` needs no write
    permission and creates or changes nothing. An older schema and calls that write are refused.
    """
    address = with_environment(url)
    scheme, separator, _ = address.partition("://")
    if not separator:
        raise UnusableStoreError(
            f"{without_password(url)!r} is not the URL of a store: write it as sqlite:///PATH, "
            "postgresql://... or mongodb://..."
        )

    for name in dict.fromkeys(SCHEMES.values()) if scheme not in SCHEMES else (SCHEMES[scheme],):
        import_module(f"agentevo.store.{name}")

    return await stores.get(scheme)(
        address,
        timeout_s=timeout_s,
        create=create and not read_only,
        retries=retries,
        clock=clock,
        read_only=read_only,
    )
