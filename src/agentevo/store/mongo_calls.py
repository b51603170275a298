"""Calls in MongoDB: a collection `calls` with a document for each row of tables.py. `_id` is the
call's id. Each document is written separately, and repeating a write changes nothing, so no
transaction is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentevo.store.calls import (
    LOST_S,
    NEVER_SEEN,
    CallState,
    StoredCall,
    check_recorder,
    decode_call,
    encode_call,
)
from agentevo.store.clock import CLOCK_TOLERANCE_S, Now
from agentevo.store.mongo_queries import Document
from agentevo.store.mongo_transactions import Transactions
from agentevo.store.streams import CHUNK, Streaming
from agentevo.types import Call

CALL_INDEXES: tuple[tuple[str, ...], ...] = (("seq",), ("trajectory_id", "seq"), ("seen_at",))


def _in_state(state: CallState, now: Now) -> Document:
    if state == "ended":
        return {"seen_at": None}
    first = now.steady - LOST_S
    last = now.steady + CLOCK_TOLERANCE_S
    if state == "running":
        return {"seen_at": {"$gte": first, "$lte": last}}
    return {"$or": [{"seen_at": {"$lt": first}}, {"seen_at": {"$gt": last}}]}


class MongoCalls(Transactions, Streaming):
    """The methods of `Store` for calls."""

    async def write_calls(self, calls: Iterable[Call]) -> None:
        new_calls = list(calls)
        if not new_calls:
            return
        now = await self._now()
        rows = [encode_call(call, now.steady) for call in new_calls]
        await self._upsert("write_calls", rows, changing=True)

    async def _put_calls(self, calls: Iterable[Call]) -> int:
        """The part of `Store.put` for calls."""
        rows = [encode_call(call, NEVER_SEEN) for call in calls]
        return await self._upsert("put", rows, changing=False) if rows else 0

    async def _upsert(self, what: str, rows: list[Document], *, changing: bool) -> int:
        """Writes the rows and returns the number of new ones. Known rows change only in the fields
        `changing`."""
        from pymongo import UpdateOne

        first = await self._reserve_numbers("calls", len(rows))

        def update(row: Document, seq: int) -> Any:
            fields = {name: value for name, value in row.items() if name != "id"}
            new: Document = {"$setOnInsert": {"seq": seq}}
            if changing:
                new["$set"] = fields
            else:
                new["$setOnInsert"] |= fields
            return UpdateOne({"_id": row["id"]}, new, upsert=True)

        updates = [update(row, first + i) for i, row in enumerate(rows)]

        async def work() -> int:
            result = await self._database["calls"].bulk_write(updates, ordered=True)
            return int(result.upserted_count)

        return await self._retry(what, work)

    async def renew_calls(self, recorder: str) -> None:
        check_recorder(recorder)
        now = await self._now()
        own_calls = {"seen_at": {"$ne": None}, "_id": {"$regex": f"^{recorder}-"}}

        async def work() -> None:
            await self._database["calls"].update_many(own_calls, {"$set": {"seen_at": now.steady}})

        await self._retry("renew_calls", work)

    async def _newest_call_seq(self) -> int:
        async def work() -> int:
            newest = await self._database["calls"].find_one({}, ["seq"], sort=[("seq", -1)])
            return int(newest["seq"]) if newest else 0

        return await self._retry("calls", work)

    async def _call_page(
        self,
        trajectory_id: str | None,
        state: CallState | None,
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredCall]]:
        now = await self._now()
        where: Document = {} if state is None else _in_state(state, now)
        if trajectory_id is not None:
            where["trajectory_id"] = trajectory_id
        if seqs is not None:
            where["seq"] = {"$gte": seqs.start, "$lt": seqs.stop}

        async def work() -> list[Document]:
            cursor = self._database["calls"].find(where).sort("seq", -1 if newest_first else 1)
            documents: list[Document] = await cursor.limit(limit).to_list()
            return documents

        documents = await self._retry("calls", work)
        return [(d["seq"], decode_call({**d, "id": d["_id"]}, now.steady)) for d in documents]

    async def num_calls(self) -> int:
        async def work() -> int:
            return int(await self._database["calls"].count_documents({}))

        return await self._retry("num_calls", work)

    async def _delete_calls(self, *, grace_s: float, dropped: bool) -> int:
        """The part of `Store.gc` for calls. It reads the calls page by page in the order of seq.
        The calls of one trajectory may be on several pages."""
        now = await self._now()
        deleted = 0
        after = 0
        while True:
            page = await self._places_of_calls(after)
            doomed = await self._find_doomed(
                {call["trajectory_id"] for call in page}, dropped=dropped
            )
            old = now.wall - grace_s
            running = now.steady - LOST_S
            ids = [
                call["_id"]
                for call in page
                if doomed.get(call["trajectory_id"]) == "dropped"
                or (
                    doomed.get(call["trajectory_id"]) == "absent"
                    and call["started_at"] < old
                    and (call["seen_at"] is None or call["seen_at"] < running)
                )
            ]

            async def work(ids: list[str] = ids) -> int:
                result = await self._database["calls"].delete_many({"_id": {"$in": ids}})
                return int(result.deleted_count)

            deleted += await self._retry("gc", work) if ids else 0
            if len(page) < CHUNK:
                return deleted

            after = page[-1]["seq"]

    async def _places_of_calls(self, after: int) -> list[Document]:
        names = ["seq", "trajectory_id", "started_at", "seen_at"]

        async def work() -> list[Document]:
            cursor = self._database["calls"].find({"seq": {"$gt": after}}, names).sort("seq", 1)
            documents: list[Document] = await cursor.limit(CHUNK).to_list()
            return documents

        return await self._retry("gc", work)

    async def _find_doomed(self, names: Iterable[str], *, dropped: bool) -> dict[str, str]:
        """Maps a trajectory's id to `absent`, or to `dropped` if its turns are deleted too."""
        candidates = list(names)
        chosen = {"_id": {"$in": candidates}}

        async def work() -> dict[str, str]:
            states = {
                d["_id"]: d["state"]
                for d in await self._database["trajectories"].find(chosen, ["state"]).to_list()
            }
            ids_with_tokens = {
                d["_id"] for d in await self._database["tokens"].find(chosen, ["_id"]).to_list()
            }
            absent = {name: "absent" for name in candidates if name not in states}
            emptied = {
                name: "dropped"
                for name, state in states.items()
                if dropped and state == "dropped" and name not in ids_with_tokens
            }
            return absent | emptied

        return await self._retry("gc", work)
