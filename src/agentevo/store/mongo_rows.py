"""Facts and ledger in MongoDB's words: what facts, leases and ledger are for SQL. Each function
runs inside the transaction of `session`.

    tasks, trajectories   a document for a row of tables.py, `_id` being its id
    tokens                {_id: id of the trajectory, data}
    steps                 {_id: step, record, num_trajectories, committed_at}
    calls                 see mongo_calls.py
    meta                  {_id: "schema", version}, {_id: "tasks", "trajectories" or "calls", seq},
                          {_id: "trainer", turn}

A transaction sees a snapshot, and one that writes a document which another has written meanwhile is
begun again. What only reads what the other writes would slip through; so reserve, commit, release,
drop, rewind and gc all write `meta.trainer`, and go one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentevo.errors import StoreError
from agentevo.store import rules
from agentevo.store.clock import Now
from agentevo.store.codec import (
    SUMMARY_COLUMNS,
    EncodedTask,
    EncodedTrajectory,
    decode_history,
    decode_step,
    decode_stored,
    decode_summary,
    decode_task,
    encode_history,
)
from agentevo.store.store import (
    SPLITS,
    TASK_STATES,
    TRAJECTORY_STATES,
    Lease,
    RetryPolicy,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskEvent,
    TaskState,
    TrajectorySummary,
)
from agentevo.store.streams import CHUNK, chunks, whole_groups

Document = dict[str, Any]

LET_GO: Document = {
    "worker": None,
    "lease_started_at": None,
    "lease_expires_at": None,
    "not_before": 0.0,
}
_READY: Document = {"state": "ready", "trained_step": None}


def row_of(document: Mapping[str, Any]) -> Document:
    return {**document, "id": document["_id"]}


def _document(row: Mapping[str, Any], seq: int) -> Document:
    return {"_id": row["id"], "seq": seq} | {
        name: value for name, value in row.items() if name != "id"
    }


class Rows:
    """The collections of a database, in a transaction."""

    def __init__(self, database: Any, session: Any) -> None:
        self.database, self.session = database, session
        self.tasks, self.trajectories = database["tasks"], database["trajectories"]
        self.tokens, self.steps, self.meta = database["tokens"], database["steps"], database["meta"]

    async def take_turn(self) -> None:
        """Of two transactions that take a turn at the same time, one begins again."""
        await self.meta.update_one(
            {"_id": "trainer"}, {"$inc": {"turn": 1}}, upsert=True, session=self.session
        )

    async def find(self, collection: Any, where: Document, *names: str) -> list[Document]:
        documents: list[Document] = await collection.find(
            where, list(names) if names else None, session=self.session
        ).to_list()
        return documents

    async def by_id(self, collection: Any, ids: Iterable[Any], *names: str) -> dict[Any, Document]:
        documents: dict[Any, Document] = {}
        for chunk in chunks(dict.fromkeys(ids)):
            documents.update(
                (document["_id"], document)
                for document in await self.find(collection, {"_id": {"$in": chunk}}, *names)
            )
        return documents

    async def _new(
        self, kind: str, items: Sequence[EncodedTask] | Sequence[EncodedTrajectory]
    ) -> list[Any]:
        """The items that must be inserted, each id once. Refuses an id that stands for two
        contents."""
        known = {
            name: bytes(document["digest"])
            for name, document in (
                await self.by_id(self.database[kind], (i.id for i in items), "digest")
            ).items()
        }
        new: list[Any] = []
        for item in items:
            if item.id in known:
                rules.check_same_content(kind, item.id, item.digest, known[item.id])
            else:
                known[item.id] = item.digest
                new.append(item)
        return new

    async def insert_tasks(
        self, items: Sequence[EncodedTask], first: int, *, queue: bool = True
    ) -> int:
        """`first` begins a range of numbers that is ours. Without `queue`, see Store.add_tasks."""
        new = await self._new("tasks", items)
        place = {} if queue else {"state": "completed"}
        if new:
            await self.tasks.insert_many(
                [_document(item.row | place, first + i) for i, item in enumerate(new)],
                session=self.session,
            )
        for chunk in chunks(() if queue else (item.id for item in items)):
            waiting = {"_id": {"$in": chunk}, "state": "queued"}
            await self.tasks.update_many(
                waiting, {"$set": place | {"not_before": 0.0}}, session=self.session
            )
        return len(new)

    async def insert_trajectories(
        self, items: Sequence[EncodedTrajectory], first: int, now: float
    ) -> int:
        new = await self._new("trajectories", items)
        if new:
            documents = [
                _document({"written_at": now} | item.row, first + i) for i, item in enumerate(new)
            ]
            await self.trajectories.insert_many(documents, session=self.session)
            data = [{"_id": item.id, "data": item.data} for item in new if item.data is not None]
            if data:
                await self.tokens.insert_many(data, session=self.session)
        return len(new)

    async def insert_steps(self, rows: Sequence[Document]) -> int:
        documents = await self.by_id(self.steps, (row["step"] for row in rows), "record")
        known = {step: document["record"] for step, document in documents.items()}
        new = [
            row
            for row in rows
            if rules.must_commit(
                row["step"], row["record"], known=known.get(row["step"]), ids=None, here=set()
            )
        ]
        if new:
            await self.steps.insert_many(
                [{"_id": row["step"], **row} for row in new], session=self.session
            )
        return len(new)

    async def read_task(self, task_id: str) -> StoredTask:
        document = await self.tasks.find_one({"_id": task_id}, session=self.session)
        if document is None:
            raise StoreError(f"no task {task_id!r} in this store: add it with add_tasks")
        return decode_task(document)

    async def read_tasks(
        self, state: str | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        where = {"seq": {"$gt": after}} | ({"state": state} if state else {})
        documents = (
            await self.tasks.find(where, session=self.session).sort("seq", 1).limit(limit).to_list()
        )
        return [(document["seq"], decode_task(document)) for document in documents]

    async def newest_seq(self) -> int:
        newest = (
            await self.trajectories.find({}, ["seq"], session=self.session)
            .sort("seq", -1)
            .limit(1)
            .to_list()
        )
        return int(newest[0]["seq"]) if newest else 0

    async def read_page(
        self,
        properties: Mapping[str, object],
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredTrajectory]]:
        where = {"_id" if name == "id" else name: value for name, value in properties.items()}
        if seqs is not None:
            where["seq"] = {"$gte": seqs.start, "$lt": seqs.stop}
        documents = (
            await self.trajectories.find(where, session=self.session)
            .sort("seq", -1 if newest_first else 1)
            .limit(limit)
            .to_list()
        )
        data = await self.by_id(self.tokens, (document["_id"] for document in documents))
        blobs = [data.get(document["_id"], {}).get("data") for document in documents]
        return [
            (d["seq"], decode_stored(row_of(d), blob and bytes(blob)))
            for d, blob in zip(documents, blobs, strict=True)
        ]

    async def read_summaries(
        self, properties: Mapping[str, object], *, limit: int | None, newest_first: bool
    ) -> list[TrajectorySummary]:
        if limit == 0:
            return []
        names = [name for name in SUMMARY_COLUMNS if name != "id"]
        cursor = self.trajectories.find(dict(properties), names, session=self.session).sort(
            "seq", -1 if newest_first else 1
        )
        return [
            decode_summary(row_of(document))
            for document in await cursor.limit(limit or 0).to_list()
        ]

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        async def page(after: int, length: int) -> list[tuple[int, str]]:
            where = {"state": "ready", "split": split, "seq": {"$gt": after}}
            cursor = (
                self.trajectories.find(where, ["seq", "group_id"], session=self.session)
                .sort("seq", 1)
                .limit(length)
            )
            return [(document["seq"], document["group_id"]) for document in await cursor.to_list()]

        async def members(groups: list[str]) -> list[tuple[str, str]]:
            states: list[tuple[str, str]] = []
            for chunk in chunks(groups):
                where = {"group_id": {"$in": chunk}, "split": split}
                states += [
                    (d["group_id"], d["state"])
                    for d in await self.find(self.trajectories, where, "group_id", "state")
                ]
            return states

        return await whole_groups(page, members, size=size, limit=limit)

    async def outstanding(self, split: Split) -> int:
        waiting = await self.tasks.count_documents(
            {"state": {"$in": ["queued", "leased"]}}, session=self.session
        )
        where = {"state": {"$in": ["ready", "reserved"]}, "split": split}
        return int(waiting) + len(
            {
                document["task_id"]
                for document in await self.find(self.trajectories, where, "task_id")
            }
        )

    async def count(self) -> dict[str, int]:
        counts = {f"tasks/{state}": 0 for state in TASK_STATES}
        counts |= {
            f"trajectories/{split}/{state}": 0 for split in SPLITS for state in TRAJECTORY_STATES
        } | {"turns": 0}
        by_state = [{"$group": {"_id": "$state", "n": {"$sum": 1}}}]
        for document in await (
            await self.tasks.aggregate(by_state, session=self.session)
        ).to_list():
            counts[f"tasks/{document['_id']}"] = document["n"]
        place = {"split": "$split", "state": "$state"}
        by_place = [{"$group": {"_id": place, "n": {"$sum": 1}, "turns": {"$sum": "$num_turns"}}}]
        for document in await (
            await self.trajectories.aggregate(by_place, session=self.session)
        ).to_list():
            counts[f"trajectories/{document['_id']['split']}/{document['_id']['state']}"] = (
                document["n"]
            )
            counts["turns"] += document["turns"]
        return counts | {"steps": await self.steps.count_documents({}, session=self.session)}

    async def _held(self, lease: Lease, wanted: str | tuple[str, ...]) -> Document | None:
        """The lease's task if it must still move to `wanted`."""
        document: Document | None = await self.tasks.find_one(
            {"_id": lease.task.id}, session=self.session
        )
        place = (
            None if document is None else rules.TaskPlace(document["state"], document["fencing_id"])
        )
        return document if rules.holds(place, lease, wanted) else None

    async def _set_task(self, name: str, changes: Document) -> None:
        await self.tasks.update_one({"_id": name}, {"$set": changes}, session=self.session)

    async def renew(self, lease: Lease, *, now: Now, lease_s: float) -> float:
        await self._held(lease, ())
        await self._set_task(
            lease.task.id,
            {"lease_started_at": now.steady, "lease_expires_at": now.steady + lease_s},
        )
        return now.steady + lease_s

    async def finish(self, lease: Lease, *, error: str | None, now: Now) -> None:
        state = "completed" if error is None else "failed"
        document = await self._held(lease, state)
        if document is not None:
            changes = LET_GO | {"state": state}
            if error is not None:
                changes |= {
                    "error": error,
                    "history": _appended(document, "failed", lease, now, error),
                }
            await self._set_task(lease.task.id, changes)

    async def retry(self, lease: Lease, error: str, *, now: Now, retries: RetryPolicy) -> TaskState:
        document = await self._held(lease, ("queued", "poison"))
        if document is None:
            return (await self.read_task(lease.task.id)).state
        num_failures = document["num_failures"] + 1
        state = rules.after_failure(num_failures, retries)
        changes: Document = {"state": state, "num_failures": num_failures, "error": error}
        changes["history"] = _appended(document, "retried", lease, now, error)
        changes["not_before"] = (
            now.steady + retries.delay_s(num_failures) if state == "queued" else 0.0
        )
        await self._set_task(lease.task.id, LET_GO | changes)
        return state

    async def give_back(self, lease: Lease) -> None:
        if await self._held(lease, "queued") is not None:
            await self._set_task(lease.task.id, LET_GO | {"state": "queued"})

    async def _places(self, ids: Iterable[str]) -> dict[str, rules.Place]:
        documents = await self.by_id(
            self.trajectories, ids, "split", "state", "trained_step", "drop_reason"
        )
        return {
            name: rules.Place(d["split"], d["state"], d["trained_step"], d["drop_reason"])
            for name, d in documents.items()
        }

    async def _set(self, ids: Iterable[str], **values: Any) -> None:
        for chunk in chunks(ids):
            await self.trajectories.update_many(
                {"_id": {"$in": chunk}}, {"$set": values}, session=self.session
            )

    async def reserve(self, ids: list[str], step: int) -> int:
        rules.check_reservable(
            step,
            committed=await self.steps.find_one({"_id": step}, session=self.session) is not None,
        )
        moving = rules.moving_to_reserved(ids, await self._places(ids), step)
        await self._set(moving, state="reserved", trained_step=step)
        return len(moving)

    async def commit_step(
        self, step: int, record: str, *, ids: list[str] | None, now: float
    ) -> int:
        here = {
            document["_id"]
            for document in await self.find(self.trajectories, {"trained_step": step}, "_id")
        }
        known = await self.steps.find_one({"_id": step}, session=self.session)
        if not rules.must_commit(step, record, known=known and known["record"], ids=ids, here=here):
            return 0
        values = {
            "_id": step,
            "step": step,
            "record": record,
            "num_trajectories": len(here),
            "committed_at": now,
        }
        await self.steps.insert_one(values, session=self.session)
        await self._set(here, state="committed")
        return len(here)

    async def release(self, step: int | None) -> int:
        where = {"state": "reserved"} | ({} if step is None else {"trained_step": step})
        return int(
            (
                await self.trajectories.update_many(where, {"$set": _READY}, session=self.session)
            ).modified_count
        )

    async def drop(self, ids: list[str], reason: str) -> int:
        moving = rules.moving_to_dropped(ids, await self._places(ids), reason)
        await self._set(moving, state="dropped", trained_step=None, drop_reason=reason)
        return len(moving)

    async def rewind(self, step: int, *, keep: bool) -> int:
        rules.check_rewind(
            step, known=await self.steps.find_one({"_id": step}, session=self.session) is not None
        )
        return await self._forget_steps(step) if keep else await self._delete_after(step)

    async def _forget_steps(self, step: int) -> int:
        """Store.rewind with `keep`."""
        taken = {"trained_step": {"$gt": step}}
        again = (
            await self.trajectories.update_many(taken, {"$set": _READY}, session=self.session)
        ).modified_count
        dropped = await self.find(
            self.trajectories, {"step": {"$gt": step}, "state": "dropped"}, "_id"
        )
        whole = await self.by_id(self.tokens, (document["_id"] for document in dropped), "_id")
        await self._set(whole, **_READY, drop_reason=None)
        await self.steps.delete_many({"_id": {"$gt": step}}, session=self.session)
        return int(again) + len(whole)

    async def _delete_after(self, step: int) -> int:
        """Store.rewind without it."""
        later = await self.find(self.trajectories, {"step": {"$gt": step}}, "task_id")
        for chunk in chunks(document["_id"] for document in later):
            await self.tokens.delete_many({"_id": {"$in": chunk}}, session=self.session)
            await self.database["calls"].delete_many(
                {"trajectory_id": {"$in": chunk}}, session=self.session
            )
        await self.trajectories.delete_many({"step": {"$gt": step}}, session=self.session)
        await self.trajectories.update_many(
            {"trained_step": {"$gt": step}}, {"$set": _READY}, session=self.session
        )
        await self.steps.delete_many({"_id": {"$gt": step}}, session=self.session)
        fresh = LET_GO | {"state": "queued", "num_failures": 0, "num_expiries": 0, "error": None}
        again = {"$set": fresh, "$inc": {"fencing_id": 1}}
        await self.tasks.update_many({"state": "leased"}, again, session=self.session)
        lost = set()
        for name in {document["task_id"] for document in later}:
            if (
                await self.trajectories.find_one({"task_id": name}, ["_id"], session=self.session)
                is None
            ):
                lost.add(name)
        for chunk in chunks(lost):
            where = {"_id": {"$in": chunk}, "state": {"$in": ["completed", "failed"]}}
            await self.tasks.update_many(where, again, session=self.session)
        return len(later)

    async def read_steps(
        self, *, after: int | None = None, last_only: bool = False
    ) -> list[StepRecord]:
        where = {} if after is None else {"_id": {"$gt": after}}
        cursor = (
            self.steps.find(where, session=self.session)
            .sort("_id", -1 if last_only else 1)
            .limit(1 if last_only else 0)
        )
        return [decode_step(document) for document in await cursor.to_list()]

    async def queue_again(self) -> int:
        fresh = LET_GO | {"state": "queued", "num_failures": 0, "num_expiries": 0, "error": None}
        where = {"state": {"$in": ["poison", "failed"]}}
        return int(
            (
                await self.tasks.update_many(
                    where, {"$set": fresh, "$inc": {"fencing_id": 1}}, session=self.session
                )
            ).modified_count
        )

    async def requeue_old(self, before: float) -> int:
        where = {"state": "leased", "lease_expires_at": {"$lte": before}}
        again = {"$set": LET_GO | {"state": "queued"}, "$inc": {"fencing_id": 1}}
        return int(
            (await self.tasks.update_many(where, again, session=self.session)).modified_count
        )

    async def delete_orphans(self, after: str | None) -> tuple[int, str | None]:
        """Tokens without a trajectory, of the next CHUNK by id: how many, and after which id to go
        on, None at the end."""
        where = {} if after is None else {"_id": {"$gt": after}}
        cursor = self.tokens.find(where, ["_id"], session=self.session).sort("_id", 1).limit(CHUNK)
        page = [document["_id"] for document in await cursor.to_list()]
        known = await self.by_id(self.trajectories, page, "_id")
        deleted = await self._delete_tokens([name for name in page if name not in known])
        return deleted, page[-1] if len(page) == CHUNK else None

    async def delete_dropped_tokens(self, after: int | None) -> tuple[int, int | None]:
        """Of the next CHUNK of dropped trajectories in the order of seq, as in ledger.py; returns
        likewise."""
        newest = (
            await self.steps.find({}, ["_id"], session=self.session)
            .sort("_id", -1)
            .limit(1)
            .to_list()
        )
        last = newest[0]["_id"] if newest else 0
        where = {"state": "dropped", "seq": {"$gt": after or 0}}
        cursor = (
            self.trajectories.find(where, ["seq", "step", "split", "task_id"], session=self.session)
            .sort("seq", 1)
            .limit(CHUNK)
        )
        page = await cursor.to_list()
        past = [document for document in page if document["step"] <= last]
        using = {
            "task_id": {"$in": list({document["task_id"] for document in past})},
            "state": {"$in": ["ready", "reserved"]},
        }
        in_use = {
            (document["task_id"], document["split"])
            for document in await self.find(self.trajectories, using, "task_id", "split")
        }
        deleted = await self._delete_tokens(
            [
                document["_id"]
                for document in past
                if (document["task_id"], document["split"]) not in in_use
            ]
        )
        return deleted, page[-1]["seq"] if len(page) == CHUNK else None

    async def _delete_tokens(self, ids: list[str]) -> int:
        return (
            int(
                (
                    await self.tokens.delete_many({"_id": {"$in": ids}}, session=self.session)
                ).deleted_count
            )
            if ids
            else 0
        )


def _appended(document: Document, kind: Any, lease: Lease, now: Now, error: str) -> str:
    event = TaskEvent(
        kind=kind, worker=lease.worker, fencing_id=lease.fencing_id, at=now.wall, error=error
    )
    return encode_history([*decode_history(document["history"]), event])
