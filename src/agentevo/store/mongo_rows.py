"""Leases and ledger in MongoDB: the counterpart of leases.py and ledger.py. Each method runs inside
the transaction of `session`.

    tasks, trajectories   a document for a row of tables.py, `_id` being its id
    tokens                {_id: id of the trajectory, data}
    steps                 {_id: step, record, num_trajectories, committed_at}
    calls                 see mongo_calls.py
    meta                  {_id: "schema", version}, {_id: "tasks", "trajectories" or "calls", seq},
                          {_id: "trainer", turn}

A transaction sees a snapshot. If it writes a document that another transaction has changed since
then, it is retried. If it only reads such a document, it is not retried. So reserve, commit,
release, drop, rewind and gc all write `meta.trainer`, and run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentevo.store import rules
from agentevo.store.clock import Now
from agentevo.store.codec import decode_history, encode_history
from agentevo.store.mongo_queries import Document, Queries
from agentevo.store.records import Lease, RetryPolicy, TaskEvent, TaskState
from agentevo.store.streams import CHUNK, chunks

NO_LEASE: Document = {
    "worker": None,
    "lease_started_at": None,
    "lease_expires_at": None,
    "not_before": 0.0,
}
_READY: Document = {"state": "ready", "trained_step": None}


class MongoRows(Queries):
    """All operations of a transaction on the collections of a database."""

    async def _leased_task(self, lease: Lease, target: str | tuple[str, ...]) -> Document | None:
        """The lease's task if it must still change to `target`."""
        document: Document | None = await self.tasks.find_one(
            {"_id": lease.task.id}, session=self.session
        )
        place = (
            None if document is None else rules.TaskPlace(document["state"], document["fencing_id"])
        )
        return document if rules.must_change(place, lease, target) else None

    async def _set_task(self, name: str, changes: Document) -> None:
        await self.tasks.update_one({"_id": name}, {"$set": changes}, session=self.session)

    async def renew(self, lease: Lease, *, now: Now, lease_s: float) -> float:
        await self._leased_task(lease, ())
        await self._set_task(
            lease.task.id,
            {"lease_started_at": now.steady, "lease_expires_at": now.steady + lease_s},
        )
        return now.steady + lease_s

    async def finish(self, lease: Lease, *, error: str | None, now: Now) -> None:
        state = "completed" if error is None else "failed"
        document = await self._leased_task(lease, state)
        if document is not None:
            changes = NO_LEASE | {"state": state}
            if error is not None:
                changes |= {
                    "error": error,
                    "history": _append_event(document, "failed", lease, now, error),
                }
            await self._set_task(lease.task.id, changes)

    async def retry(self, lease: Lease, error: str, *, now: Now, retries: RetryPolicy) -> TaskState:
        document = await self._leased_task(lease, ("queued", "poison"))
        if document is None:
            return (await self.read_task(lease.task.id))[1].state

        num_failures = document["num_failures"] + 1
        state = rules.after_failure(num_failures, retries)
        changes: Document = {"state": state, "num_failures": num_failures, "error": error}
        changes["history"] = _append_event(document, "retried", lease, now, error)
        changes["not_before"] = (
            now.steady + retries.delay_s(num_failures) if state == "queued" else 0.0
        )
        await self._set_task(lease.task.id, NO_LEASE | changes)

        return state

    async def give_back(self, lease: Lease) -> None:
        if await self._leased_task(lease, "queued") is not None:
            await self._set_task(lease.task.id, NO_LEASE | {"state": "queued"})

    async def _places(self, ids: Iterable[str]) -> dict[str, rules.TrajectoryPlace]:
        documents = await self.by_id(
            self.trajectories, ids, "split", "state", "trained_step", "drop_reason"
        )
        return {
            name: rules.TrajectoryPlace(d["split"], d["state"], d["trained_step"], d["drop_reason"])
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
        self,
        step: int,
        record: str,
        *,
        ids: list[str] | None,
        dropped: Mapping[str, Sequence[str]],
        now: float,
    ) -> int:
        for reason, names in dropped.items():
            await self.drop(list(names), reason)

        step_ids = {
            document["_id"]
            for document in await self.find(self.trajectories, {"trained_step": step}, "_id")
        }
        stored_step = await self.steps.find_one({"_id": step}, session=self.session)
        if not rules.must_commit(
            step,
            record,
            stored_record=stored_step and stored_step["record"],
            ids=ids,
            step_ids=step_ids,
        ):
            return 0

        values = {
            "_id": step,
            "step": step,
            "record": record,
            "num_trajectories": len(step_ids),
            "committed_at": now,
        }
        await self.steps.insert_one(values, session=self.session)
        await self._set(step_ids, state="committed")

        return len(step_ids)

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
            step,
            is_committed=await self.steps.find_one({"_id": step}, session=self.session) is not None,
        )
        return await self._forget_steps(step) if keep else await self._delete_after(step)

    async def _forget_steps(self, step: int) -> int:
        """`Store.rewind` with `keep`: trajectories stay and can be trained on again."""
        taken = {"trained_step": {"$gt": step}}
        num_reset = (
            await self.trajectories.update_many(taken, {"$set": _READY}, session=self.session)
        ).modified_count
        dropped = await self.find(
            self.trajectories, {"step": {"$gt": step}, "state": "dropped"}, "_id"
        )
        ids_with_tokens = await self.by_id(
            self.tokens, (document["_id"] for document in dropped), "_id"
        )
        await self._set(ids_with_tokens, **_READY, drop_reason=None)
        await self.steps.delete_many({"_id": {"$gt": step}}, session=self.session)
        return int(num_reset) + len(ids_with_tokens)

    async def _delete_after(self, step: int) -> int:
        """`Store.rewind` without `keep`: trajectories that were sampled for later steps are
        deleted."""
        later = await self.find(self.trajectories, {"step": {"$gt": step}}, "task_id", "split")
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
        fresh = NO_LEASE | {"state": "queued", "num_failures": 0, "num_expiries": 0, "error": None}
        requeue = {"$set": fresh, "$inc": {"fencing_id": 1}}
        await self.tasks.update_many({"state": "leased"}, requeue, session=self.session)

        lost_tasks = set()
        for name in {document["task_id"] for document in later if document["split"] == "train"}:
            if (
                await self.trajectories.find_one({"task_id": name}, ["_id"], session=self.session)
                is None
            ):
                lost_tasks.add(name)

        for chunk in chunks(lost_tasks):
            where = {"_id": {"$in": chunk}, "state": {"$in": ["completed", "failed"]}}
            await self.tasks.update_many(where, requeue, session=self.session)

        return len(later)

    async def queue_again(self) -> int:
        fresh = NO_LEASE | {"state": "queued", "num_failures": 0, "num_expiries": 0, "error": None}
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
        requeue = {"$set": NO_LEASE | {"state": "queued"}, "$inc": {"fencing_id": 1}}
        return int(
            (await self.tasks.update_many(where, requeue, session=self.session)).modified_count
        )

    async def delete_orphans(self, after: str | None) -> tuple[int, str | None]:
        """Deletes tokens without a trajectory, of the next CHUNK by id. Returns the number, and the
        id after which to continue, or None at the end."""
        where = {} if after is None else {"_id": {"$gt": after}}
        cursor = self.tokens.find(where, ["_id"], session=self.session).sort("_id", 1).limit(CHUNK)
        page = [document["_id"] for document in await cursor.to_list()]
        owners = await self.by_id(self.trajectories, page, "_id")
        deleted = await self._delete_tokens([name for name in page if name not in owners])
        return deleted, page[-1] if len(page) == CHUNK else None

    async def delete_dropped_tokens(self, after: int | None) -> tuple[int, int | None]:
        """Deletes the tokens of the next CHUNK of dropped trajectories in the order of seq, as
        ledger.py does. Returns the same pair as `delete_orphans`."""
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


def _append_event(document: Document, kind: Any, lease: Lease, now: Now, error: str) -> str:
    event = TaskEvent(
        kind=kind, worker=lease.worker, fencing_id=lease.fencing_id, at=now.wall, error=error
    )
    return encode_history([*decode_history(document["history"]), event])
