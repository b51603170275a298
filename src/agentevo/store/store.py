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

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack

import msgspec

from agentevo.errors import UnusableStoreError
from agentevo.runtime.event_loop import in_thread
from agentevo.store import rules
from agentevo.store.calls import (
    NEVER_SEEN,
    CallFilter,
    StoredCall,
    check_recorder,
    checked_call_filters,
    encode_call,
)
from agentevo.store.cleanup import delete_calls, delete_dropped_tokens, delete_orphans
from agentevo.store.codec import (
    encode_record,
    encode_step,
    encode_stored,
    encode_stored_task,
    encode_task,
    encode_trajectories,
)
from agentevo.store.database_rows import Condition, chunks, within
from agentevo.store.image_rows import (
    IMAGE_PAGE,
    batches,
    decode_image_row,
    decode_intact_images,
    delete_unused_images,
    encode_image,
    find_digests,
    find_images,
    put_batch,
)
from agentevo.store.records import (
    Lease,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskState,
    TrajectoryFilter,
    TrajectorySummary,
    checked_filters,
)
from agentevo.store.rows import Rows
from agentevo.store.transactions import Piece, Transactions
from agentevo.types import Call, Task, Trajectory
from agentevo.types.images import ImageFile

PAGE = 64
"""The number of rows that a query reads while streaming."""
CALL_PAGE = 500
NONE_DROPPED: Mapping[str, Sequence[str]] = MappingProxyType({})
TABLES = ("image_uses", "images", "calls", "tokens", "trajectories", "tasks", "steps")
"""The tables in the order in which their rows can be deleted."""
CALLS_AT_ONCE = 200
"""The largest number of calls in a transaction, so that no other writer waits long for it."""


class Store(Transactions):
    """The operations of every backend. All calls raise `StoreError` for refusals,
    `StoreUnavailableError` (a subclass) while the database can't be reached, and
    `DeadlineExceededError` when the database is too slow.

    Every call is a transaction.
    """

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

    async def put_images(self, images: Iterable[ImageFile]) -> int:
        """Stores images under their digests, before the tasks and trajectories that name them are
        written. Returns the number of new ones. A transaction writes one large image or several
        small ones. Raises StoreError for bytes with another digest."""
        encoded = await in_thread(lambda: [encode_image(image) for image in images])
        new = 0
        for batch in batches(encoded):
            new += await self._run("put_images", partial(put_batch, images=batch), "worker")
        return new

    async def image(self, sha256: str) -> ImageFile:
        """Raises UnusableStoreError for an image that is missing, or whose bytes were changed."""
        page = await self._run("image", partial(find_images, digests=[sha256]))
        if not page:
            raise UnusableStoreError(f"no image {sha256!r} in {self.where}")
        image: ImageFile = await in_thread(decode_image_row, page[0])
        return image

    async def images(self, digests: Iterable[str]) -> dict[str, ImageFile]:
        """Maps a digest to its image, for those of these images that the store has. An image that
        is missing, or whose bytes were changed, is absent."""
        images: dict[str, ImageFile] = {}
        for page in chunks(dict.fromkeys(digests), IMAGE_PAGE):
            page_rows = await self._run("images", partial(find_images, digests=page))
            images |= await in_thread(decode_intact_images, page_rows)
        return images

    async def image_digests(self, *, trajectory_id: str | None = None) -> list[str]:
        """The digests of all images, or of those that a trajectory names, in order."""
        return await self._run("images", lambda rows: find_digests(rows, trajectory_id))

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
        attempts that started longer ago than the grace period and never became a trajectory, and
        the `images` that no task or trajectory names (image_rows.py).

        With `dropped`, the turns of dropped trajectories (`tokens`) and their calls are deleted
        too. Those that a resumed trainer may read stay: they were sampled for a step after the last
        committed one, or another attempt at their task is ready or reserved. Then the disk gets the
        space back (`bytes`: how much). Returns these numbers.
        """

        before = await self.size_bytes()

        async def requeue(rows: Rows, after: None) -> tuple[int, None]:
            return await rows.requeue_old((await rows.now()).steady - lease_grace_s), None

        pieces: dict[str, Piece] = {"leases": requeue, "orphans": delete_orphans}
        if dropped:
            pieces["tokens"] = delete_dropped_tokens
        pieces["calls"] = partial(delete_calls, grace_s=lease_grace_s, dropped=dropped)
        pieces["images"] = delete_unused_images
        done = dict.fromkeys(("leases", "orphans", "tokens", "calls", "images"), 0)
        done |= await self._run_pieces("gc", pieces)
        await self._vacuum()

        return done | {"bytes": before - await self.size_bytes()}

    async def clear(self) -> int:
        """Deletes all rows, for a run that replaces another. Returns how many tasks, trajectories
        and steps were deleted. No other process may use the store: a worker with an old lease could
        not be distinguished from a worker of the new run."""

        async def work(rows: Rows) -> int:
            counts = {table: await rows.delete(table) for table in TABLES}
            return counts["trajectories"] + counts["tasks"] + counts["steps"]

        return await self._run("clear", work, "alone")


def _equal(properties: Mapping[str, object]) -> list[Condition]:
    return [(name, "=", value) for name, value in properties.items()]
