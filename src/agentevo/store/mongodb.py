"""A store in MongoDB, for workers on many machines: `mongodb://USER@HOST/DATABASE?replicaSet=NAME`.
Each store is a database.

The server must be a member of a replica set (a single member is enough) or of a sharded cluster.
Only those have transactions, so all others are refused. Each call is one transaction with snapshot
reads and majority writes. Only leasing changes each document by itself, atomically, so that workers
don't block each other. Conflicts and lost connections are transient: the call is retried until its
deadline. The server's clock times leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from agentevo.errors import MissingExtraError, UnusableStoreError
from agentevo.runtime.credentials import without_password
from agentevo.runtime.event_loop import in_thread
from agentevo.store import rules
from agentevo.store.clock import CLOCK_TOLERANCE_S, Clock, Now
from agentevo.store.codec import (
    decode_history,
    decode_lease,
    encode_history,
    encode_record,
    encode_step,
    encode_stored,
    encode_stored_task,
    encode_task,
    encode_trajectories,
)
from agentevo.store.mongo_calls import MongoCalls
from agentevo.store.mongo_queries import Document, row_of
from agentevo.store.mongo_rows import NO_LEASE, MongoRows
from agentevo.store.mongo_schema import check_or_make
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
from agentevo.store.store import AWAY_S, NONE_DROPPED, stores
from agentevo.types import Call, Task, Trajectory

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient


class MongoDBStore(MongoCalls):
    """`Store` describes the guarantees of the methods. `MongoDBStore.open` and `open_store` create
    a store object."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        timeout_s: float = 60.0,
        create: bool = True,
        retries: RetryPolicy = RETRIES,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> Self:
        """Opens a database. Creates the collections and indexes if needed, unless `create` is
        false. Raises StoreError for a server without transactions and for a database with other
        content, which stays unchanged.
        """
        try:
            from pymongo import AsyncMongoClient
            from pymongo.errors import PyMongoError
            from pymongo.uri_parser import parse_uri
        except ImportError as error:
            raise MissingExtraError(
                "a store in MongoDB needs pymongo 4.13 or newer: pip install 'agentevo[mongodb]'"
            ) from error

        try:
            name = await in_thread(lambda: parse_uri(url)["database"])
            if not name:
                raise UnusableStoreError(
                    "the URL of a store in MongoDB names a database: write mongodb://HOST/DATABASE"
                )

            client: AsyncMongoClient[Document] = AsyncMongoClient(
                url, serverSelectionTimeoutMS=int(400 * min(timeout_s, AWAY_S)), w="majority"
            )
        except (PyMongoError, ValueError) as error:
            # pymongo's message may contain a part of the password, if the URL was split at the
            # wrong place.
            why = type(error).__name__ if "@" in url else error
            raise UnusableStoreError(
                f"{without_password(url)!r} is not the URL of a MongoDB database: {why}; write "
                "mongodb://HOST/DATABASE, with a password as ${env:NAME}"
            ) from None

        store = cls(
            client, name, timeout_s=timeout_s, retries=retries, clock=clock, read_only=read_only
        )
        try:
            async with store._deadline("open"):
                await check_or_make(
                    client, store._database, store.where, create=create, read_only=read_only
                )
        except BaseException:
            await client.close()
            raise

        store._is_open = True
        return store

    async def close(self) -> None:
        async with self._deadline("close"):
            await self._client.close()

    async def add_tasks(self, tasks: Iterable[Task], *, queue: bool = True) -> int:
        encoded = [encode_task(task) for task in tasks]
        first = await self._reserve_numbers("tasks", len(encoded))
        return await self._run(
            "add_tasks", lambda rows: rows.insert_tasks(encoded, first, queue=queue)
        )

    async def _numbered_task(self, task_id: str) -> tuple[int, StoredTask]:
        return await self._run("task", lambda rows: rows.read_task(task_id))

    async def _task_page(
        self, state: TaskState | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        return await self._run(
            "tasks", lambda rows: rows.read_tasks(state, after=after, limit=limit)
        )

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        async def work() -> list[Lease]:
            now = await self._read_clock()
            leases: list[Lease] = []
            while len(leases) < limit and (lease := await self._lease_next(worker, now, lease_s)):
                leases.append(lease)
            if not leases:
                await self._restart_future_leases(now)
            return leases

        return await self._retry("lease_tasks", work)

    async def _lease_next(self, worker: str, now: Now, lease_s: float) -> Lease | None:
        """Leases a task: one whose lease expired, one whose retry is due, or the oldest."""
        tasks = self._database["tasks"]
        times = {"lease_started_at": now.steady, "lease_expires_at": now.steady + lease_s}
        taken: Document = {"state": "leased", "worker": worker, "not_before": 0.0, **times}
        increments = {"$inc": {"fencing_id": 1, "num_leases": 1}}
        ran_out = {"state": "leased", "lease_expires_at": {"$lte": now.steady}}
        while (
            document := await tasks.find_one(ran_out, sort=[("lease_expires_at", 1)])
        ) is not None:
            event = rules.expired_event(document["worker"], document["fencing_id"], now.wall)
            count = document["num_expiries"] + 1
            expiry_values = {
                "num_expiries": count,
                "history": encode_history([*decode_history(document["history"]), event]),
            }
            same = {"_id": document["_id"], "fencing_id": document["fencing_id"], **ran_out}
            if rules.after_expiry(count, self._retries) == "poison":
                error = f"its leases ran out {count} times: {event.error}"
                await tasks.update_one(
                    same, {"$set": NO_LEASE | expiry_values | {"state": "poison", "error": error}}
                )
            elif (
                await tasks.update_one(same, {"$set": taken | expiry_values, **increments})
            ).modified_count:
                return decode_lease(row_of(document), worker, now=now.steady, lease_s=lease_s)

        for where, order in (
            (
                {"state": "queued", "not_before": {"$gt": 0.0, "$lte": now.steady}},
                [("not_before", 1), ("seq", 1)],
            ),
            ({"state": "queued", "not_before": 0.0}, [("seq", 1)]),
        ):
            document = await tasks.find_one_and_update(
                where, {"$set": taken, **increments}, sort=order
            )
            if document is not None:
                return decode_lease(row_of(document), worker, now=now.steady, lease_s=lease_s)

        return None

    async def _restart_future_leases(self, now: Now) -> None:
        """Shortens leases and delays that are too long because the clock was set back: see
        clock.py."""
        tasks = self._database["tasks"]
        longest = now.steady + self._retries.max_delay_s

        late = {"state": "leased", "lease_started_at": {"$gt": now.steady + CLOCK_TOLERANCE_S}}
        for document in await tasks.find(late).to_list():
            length = document["lease_expires_at"] - document["lease_started_at"]
            times = {"lease_started_at": now.steady, "lease_expires_at": now.steady + length}
            await tasks.update_one(
                {"_id": document["_id"], "fencing_id": document["fencing_id"], **late},
                {"$set": times},
            )

        await tasks.update_many(
            {"state": "queued", "not_before": {"$gt": longest}}, {"$set": {"not_before": longest}}
        )

    async def renew(self, lease: Lease, *, lease_s: float | None = None) -> Lease:
        length = lease.lease_s if lease_s is None else lease_s
        now = await self._now()
        expires_at = await self._run(
            "renew", lambda rows: rows.renew(lease, now=now, lease_s=length)
        )
        return msgspec.structs.replace(lease, lease_s=length, expires_at=expires_at)

    async def complete_task(self, lease: Lease) -> None:
        now = await self._now()
        await self._run("complete_task", lambda rows: rows.finish(lease, error=None, now=now))

    async def fail_task(self, lease: Lease, error: str) -> None:
        now = await self._now()
        await self._run("fail_task", lambda rows: rows.finish(lease, error=error, now=now))

    async def retry_task(self, lease: Lease, error: str) -> TaskState:
        now = await self._now()
        return await self._run(
            "retry_task", lambda rows: rows.retry(lease, error, now=now, retries=self._retries)
        )

    async def return_task(self, lease: Lease) -> None:
        await self._run("return_task", lambda rows: rows.give_back(lease))

    async def queue_again(self) -> int:
        return await self._run("queue_again", lambda rows: rows.queue_again())

    async def write_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        split: Split,
        step: int,
        lease: Lease | None = None,
    ) -> int:
        encoded = await in_thread(encode_trajectories, list(trajectories), split, step)
        first = await self._reserve_numbers("trajectories", len(encoded))
        now = await self._now()

        async def work(rows: MongoRows) -> int:
            if lease is not None:
                await rows.finish(lease, error=None, now=now)
            return await rows.insert_trajectories(encoded, first, now.wall)

        return await self._run("write_trajectories", work)

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        names = list(ids)
        return await self._run("reserve", lambda rows: rows.reserve(names, step), turn=True)

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
        now = await self._now()
        return await self._run(
            "commit_step",
            lambda rows: rows.commit_step(step, text, ids=names, dropped=dropped, now=now.wall),
            turn=True,
        )

    async def release(self, step: int | None = None) -> int:
        return await self._run("release", lambda rows: rows.release(step), turn=True)

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        names = list(ids)
        return await self._run("drop", lambda rows: rows.drop(names, reason), turn=True)

    async def rewind(self, step: int, *, keep: bool = False) -> int:
        return await self._run("rewind", lambda rows: rows.rewind(step, keep=keep), turn=True)

    async def _newest_seq(self) -> int:
        return await self._run("trajectories", lambda rows: rows.newest_seq())

    async def _page(
        self,
        properties: Mapping[str, object],
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredTrajectory]]:
        return await self._run(
            "trajectories",
            lambda rows: rows.read_page(
                properties, seqs=seqs, limit=limit, newest_first=newest_first
            ),
        )

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]:
        properties, limit, newest = checked_filters(filters)
        return await self._run(
            "summaries",
            lambda rows: rows.read_summaries(properties, limit=limit, newest_first=newest),
        )

    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]:
        return await self._run(
            "summaries", lambda rows: rows.read_numbered_summaries(seqs, limit=limit)
        )

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        rules.check_group(split, size, limit)
        return await self._run(
            "ready_groups", lambda rows: rows.ready_groups(split, size=size, limit=limit)
        )

    async def outstanding(self, split: Split) -> int:
        rules.check_split(split)
        return await self._run("outstanding", lambda rows: rows.outstanding(split))

    async def steps(
        self, *, after: int | None = None, limit: int | None = None
    ) -> list[StepRecord]:
        return await self._run("steps", lambda rows: rows.read_steps(after=after, limit=limit))

    async def last_step(self) -> StepRecord | None:
        return next(
            iter(await self._run("last_step", lambda rows: rows.read_steps(last_only=True))), None
        )

    async def counts(self) -> dict[str, int]:
        return await self._run("counts", lambda rows: rows.count())

    async def size_bytes(self) -> int:
        statistics = await self._retry("size_bytes", lambda: self._database.command("dbStats"))
        return int(statistics["storageSize"]) + int(statistics.get("indexSize", 0))

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
        first_task = await self._reserve_numbers("tasks", len(encoded_tasks))
        first = await self._reserve_numbers("trajectories", len(encoded))

        async def work(rows: MongoRows) -> int:
            new = await rows.insert_tasks(encoded_tasks, first_task) if encoded_tasks else 0
            new += await rows.insert_trajectories(encoded, first, 0.0) if encoded else 0
            return new + (await rows.insert_steps(new_steps) if new_steps else 0)

        return await self._run("put", work, turn=True) + await self._put_calls(calls)

    async def gc(self, *, dropped: bool = False, lease_grace_s: float = 3600.0) -> dict[str, int]:
        """The server keeps the space of deleted documents for new ones. `bytes` is the reduction of
        its files, if any."""
        before = await self.size_bytes()
        now = await self._now()
        async with self._deadline("gc"):
            done = {
                "leases": await self._run(
                    "gc", lambda rows: rows.requeue_old(now.steady - lease_grace_s), turn=True
                ),
                "orphans": await self._delete_in_pieces(MongoRows.delete_orphans, turn=False),
                "tokens": await self._delete_in_pieces(MongoRows.delete_dropped_tokens, turn=True)
                if dropped
                else 0,
                "calls": await self._delete_calls(grace_s=lease_grace_s, dropped=dropped),
            }

        return done | {"bytes": before - await self.size_bytes()}

    async def clear(self) -> int:
        """Runs outside of transactions, because a large store takes longer than a transaction may
        last. Tokens are deleted first, so `counts` shows trajectories until nothing is left."""
        deleted = 0

        async def work() -> int:
            nonlocal deleted
            await self._database["calls"].delete_many({})
            await self._database["tokens"].delete_many({})
            for name in ("trajectories", "tasks", "steps"):
                deleted += (await self._database[name].delete_many({})).deleted_count
            return deleted

        return await self._retry("clear", work)


stores.register("mongodb")(MongoDBStore.open)
stores.register("mongodb+srv")(MongoDBStore.open)
