"""Writes and reads rows in MongoDB: the counterpart of queries.py. Each method runs inside the
transaction of `session`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentevo.errors import StoreError
from agentevo.store import rules
from agentevo.store.codec import (
    SUMMARY_COLUMNS,
    EncodedTask,
    EncodedTrajectory,
    decode_step,
    decode_stored,
    decode_summary,
    decode_task,
)
from agentevo.store.records import (
    SPLITS,
    TASK_STATES,
    TRAJECTORY_STATES,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TrajectorySummary,
)
from agentevo.store.streams import chunks, whole_groups

Document = dict[str, Any]


def row_of(document: Mapping[str, Any]) -> Document:
    return {**document, "id": document["_id"]}


def _document(row: Mapping[str, Any], seq: int) -> Document:
    return {"_id": row["id"], "seq": seq} | {
        name: value for name, value in row.items() if name != "id"
    }


class Queries:
    """The collections of a database, in a transaction."""

    def __init__(self, database: Any, session: Any) -> None:
        self.database = database
        self.session = session
        self.tasks = database["tasks"]
        self.trajectories = database["trajectories"]
        self.tokens = database["tokens"]
        self.steps = database["steps"]
        self.meta = database["meta"]

    async def take_turn(self) -> None:
        """Orders transactions: if two of them take a turn at the same time, one of them starts
        again."""
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
        """The items that must be inserted, each id once. Refuses an id with two contents."""
        stored_digests = {
            name: bytes(document["digest"])
            for name, document in (
                await self.by_id(self.database[kind], (i.id for i in items), "digest")
            ).items()
        }
        new: list[Any] = []
        for item in items:
            if item.id in stored_digests:
                rules.check_same_content(kind, item.id, item.digest, stored_digests[item.id])
            else:
                stored_digests[item.id] = item.digest
                new.append(item)

        return new

    async def insert_tasks(
        self, items: Sequence[EncodedTask], first: int, *, queue: bool = True
    ) -> int:
        """The numbers of the new rows start at `first`. `Store.add_tasks` describes a call without
        `queue`."""
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
        stored_records = {step: document["record"] for step, document in documents.items()}
        new = [
            row
            for row in rows
            if rules.must_commit(
                row["step"],
                row["record"],
                stored_record=stored_records.get(row["step"]),
                ids=None,
                step_ids=set(),
            )
        ]
        if new:
            await self.steps.insert_many(
                [{"_id": row["step"], **row} for row in new], session=self.session
            )

        return len(new)

    async def read_task(self, task_id: str) -> tuple[int, StoredTask]:
        """The task as (seq, task)."""
        document = await self.tasks.find_one({"_id": task_id}, session=self.session)
        if document is None:
            raise StoreError(f"no task {task_id!r} in this store: add it with add_tasks")
        return document["seq"], decode_task(row_of(document))

    async def read_tasks(
        self, state: str | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        where = {"seq": {"$gt": after}} | ({"state": state} if state else {})
        documents = (
            await self.tasks.find(where, session=self.session).sort("seq", 1).limit(limit).to_list()
        )
        return [(document["seq"], decode_task(row_of(document))) for document in documents]

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

    async def read_numbered_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]:
        names = ["seq", *(name for name in SUMMARY_COLUMNS if name != "id")]
        where = {"seq": {"$gte": seqs.start, "$lt": seqs.stop}}
        cursor = self.trajectories.find(where, names, session=self.session).sort("seq", 1)
        return [
            (document["seq"], decode_summary(row_of(document)))
            for document in await cursor.limit(limit).to_list()
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

    async def read_steps(
        self,
        *,
        after: int | None = None,
        limit: int | None = None,
        last_only: bool = False,
    ) -> list[StepRecord]:
        if limit == 0:  # MongoDB's value for no limit
            return []

        where = {} if after is None else {"_id": {"$gt": after}}
        cursor = (
            self.steps.find(where, session=self.session)
            .sort("_id", -1 if last_only else 1)
            .limit(1 if last_only else limit or 0)
        )
        return [decode_step(document) for document in await cursor.to_list()]
