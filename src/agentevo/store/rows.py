"""What a transaction does with the rows of a store, the same for every database. A database only
finds, inserts, changes and deletes rows (database_rows.py). `rules` has the refusals, and
store.py the state diagram. The caller is responsible for transactions and deadlines.

Rows have the columns of tables.py. Inserts are idempotent by id. If the id exists with the same
digest, the row is skipped. If it exists with another digest, the row is refused. Repeating a
transition of the ledger changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from agentevo.errors import StoreError
from agentevo.store import rules
from agentevo.store.calls import LOST_S, CallState, StoredCall, decode_call
from agentevo.store.clock import CLOCK_TOLERANCE_S
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
from agentevo.store.database_rows import CHUNK, Condition, DatabaseRows, Row, chunks, within
from agentevo.store.image_rows import forget_uses, use_images
from agentevo.store.records import (
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

T = TypeVar("T")
Encoded = TypeVar("Encoded", EncodedTask, EncodedTrajectory)

NO_LEASE: Row = {
    "worker": None,
    "lease_started_at": None,
    "lease_expires_at": None,
    "not_before": 0.0,
}
_QUEUED = {**NO_LEASE, "state": "queued"}
_FRESH = {**_QUEUED, "num_failures": 0, "num_expiries": 0, "error": None}
_READY = {"state": "ready", "trained_step": None}
_NEW_FENCE = ("fencing_id",)


class Rows(DatabaseRows):
    """The rows of a store in a transaction, and the ledger's rules for them."""

    async def _missing(self, table: str, items: Sequence[Encoded]) -> list[Encoded]:
        """The items that must be inserted, each id once. Refuses an id with two contents."""
        stored = await self.by_key(table, "id", (item.id for item in items), "digest")
        digests = {name: bytes(row["digest"]) for name, row in stored.items()}
        new = []
        for item in items:
            if item.id in digests:
                rules.check_same_content(table, item.id, item.digest, digests[item.id])
            else:
                digests[item.id] = item.digest
                new.append(item)

        return new

    async def insert_tasks(self, items: Sequence[EncodedTask], *, queue: bool = True) -> int:
        """Inserts the new tasks. `Store.add_tasks` describes a call without `queue`."""
        new = await self._missing("tasks", items)
        place = {} if queue else {"state": "completed"}
        await self.insert("tasks", [item.row | place for item in new])
        await use_images(self, "task", {item.id: item.images for item in new})

        for chunk in chunks(() if queue else (item.id for item in items)):
            waiting: list[Condition] = [("id", "in", chunk), ("state", "=", "queued")]
            await self.update("tasks", waiting, place | {"not_before": 0.0})

        return len(new)

    async def insert_trajectories(self, items: Sequence[EncodedTrajectory], now: float) -> int:
        """`now` is Unix time, for rows that don't say when they were written."""
        new = await self._missing("trajectories", items)
        await self.insert("trajectories", [{"written_at": now} | item.row for item in new])

        data = {item.id: item.data for item in new if item.data is not None}
        rows = await self.by_key("trajectories", "id", data, self.trajectory_key)
        tokens = [
            {self.tokens_key: rows[name][self.trajectory_key], "data": blob}
            for name, blob in data.items()
        ]
        await self.insert("tokens", tokens)
        await use_images(self, "trajectory", {item.id: item.images for item in new})

        return len(new)

    async def insert_steps(self, rows: Sequence[Row]) -> int:
        stored = await self.by_key("steps", "step", (row["step"] for row in rows), "record")
        new = [
            row
            for row in rows
            if rules.must_commit(
                row["step"],
                row["record"],
                stored_record=stored[row["step"]]["record"] if row["step"] in stored else None,
                ids=None,
                step_ids=set(),
            )
        ]
        await self.insert("steps", new)
        return len(new)

    async def insert_calls(self, rows: Sequence[Row]) -> int:
        """Inserts calls, and leaves existing ones unchanged. Returns the number of new calls."""
        new = {(row["trajectory_id"], row["id"]): row for row in rows}
        for chunk in chunks({row["trajectory_id"] for row in rows}):
            where: list[Condition] = [("trajectory_id", "in", chunk)]
            for row in await self.find("calls", ["trajectory_id", "id"], where):
                new.pop((row["trajectory_id"], row["id"]), None)

        await self.insert("calls", list(new.values()))
        return len(new)

    async def read_task(self, task_id: str) -> tuple[int, StoredTask]:
        """The task as (seq, task)."""
        rows = await self.find("tasks", where=[("id", "=", task_id)])
        if not rows:
            raise StoreError(f"no task {task_id!r} in this store: add it with add_tasks")
        return rows[0]["seq"], decode_task(rows[0])

    async def read_tasks(
        self, state: TaskState | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        """At most `limit` (seq, task), with seq above `after`, in that order."""
        where: list[Condition] = [("seq", ">", after)]
        if state is not None:
            where.append(("state", "=", state))
        rows = await self.find("tasks", where=where, order="seq", limit=limit)
        return [(row["seq"], decode_task(row)) for row in rows]

    async def read_page(
        self, where: Sequence[Condition], *, limit: int, newest_first: bool = False
    ) -> list[tuple[int, StoredTrajectory]]:
        """At most `limit` matching (seq, trajectory) with their turns."""
        rows = await self.find(
            "trajectories", where=where, order="seq", descending=newest_first, limit=limit
        )
        keys = [row[self.trajectory_key] for row in rows]
        data = await self.by_key("tokens", self.tokens_key, keys, "data")
        return [
            (row["seq"], decode_stored(row, bytes(data[key]["data"]) if key in data else None))
            for row, key in zip(rows, keys, strict=True)
        ]

    async def read_summaries(
        self, where: Sequence[Condition], *, limit: int | None, newest_first: bool = False
    ) -> list[tuple[int, TrajectorySummary]]:
        """At most `limit` matching (seq, summary)."""
        rows = await self.find(
            "trajectories",
            ("seq", *SUMMARY_COLUMNS),
            where,
            order="seq",
            descending=newest_first,
            limit=limit,
        )
        return [(row["seq"], decode_summary(row)) for row in rows]

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        """`Store.ready_groups`, by a walk over ready rows until enough groups are complete. The
        cost depends on the answer, not on the table."""
        ready: list[str] = []
        states: dict[str, list[str]] = {}
        in_split: Condition = ("split", "=", split)
        after = 0
        length = max(64, 2 * size * min(limit, CHUNK))
        while len(ready) < limit:
            where: list[Condition] = [("state", "=", "ready"), in_split, ("seq", ">", after)]
            rows = await self.find(
                "trajectories", ["seq", "group_id"], where, order="seq", limit=length
            )
            new = list(dict.fromkeys(r["group_id"] for r in rows if r["group_id"] not in states))
            states.update((group, []) for group in new)
            for chunk in chunks(new):
                members: list[Condition] = [("group_id", "in", chunk), in_split]
                for row in await self.find("trajectories", ["group_id", "state"], members):
                    states[row["group_id"]].append(row["state"])

            ready += [group for group in new if rules.is_ready_group(states[group], size)]
            if len(rows) < length:
                break

            after = rows[-1]["seq"]

        return ready[:limit]

    async def outstanding(self, split: Split) -> int:
        untrained: list[Condition] = [
            ("state", "in", ["ready", "reserved"]),
            ("split", "=", split),
        ]
        waiting = await self.count("tasks", [("state", "in", ["queued", "leased"])])
        return waiting + await self.count("trajectories", untrained, distinct="task_id")

    async def count_all(self) -> dict[str, int]:
        """`Store.counts`."""
        counts = {f"tasks/{state}": 0 for state in TASK_STATES}
        counts |= {
            f"trajectories/{split}/{state}": 0 for split in SPLITS for state in TRAJECTORY_STATES
        }
        for (state,), num_rows, _ in await self.count_by("tasks", ["state"]):
            counts[f"tasks/{state}"] = num_rows

        counts["turns"] = 0
        for (state, split), num_rows, num_turns in await self.count_by(
            "trajectories", ["state", "split"], "num_turns"
        ):
            counts[f"trajectories/{split}/{state}"] = num_rows
            counts["turns"] += num_turns

        return counts | {"steps": await self.count("steps")}

    async def read_steps(
        self, *, after: int | None = None, limit: int | None = None, last_only: bool = False
    ) -> list[StepRecord]:
        where: list[Condition] = [] if after is None else [("step", ">", after)]
        rows = await self.find(
            "steps",
            where=where,
            order="step",
            descending=last_only,
            limit=1 if last_only else limit,
        )
        return [decode_step(row) for row in rows]

    async def _leased_task(self, lease: Lease, target: str | tuple[str, ...]) -> Row | None:
        """The lease's task if it must still change to `target`."""
        columns = ("state", "fencing_id", "num_failures", "history")
        rows = await self.find("tasks", columns, [("id", "=", lease.task.id)], lock=True)
        row = rows[0] if rows else None
        place = None if row is None else rules.TaskPlace(row["state"], row["fencing_id"])
        return row if rules.must_change(place, lease, target) else None

    async def _set_task(self, lease: Lease, values: Row) -> None:
        await self.update("tasks", [("id", "=", lease.task.id)], values)

    async def renew(self, lease: Lease, lease_s: float) -> float:
        """Renews the lease and returns its new expiry time."""
        await self._leased_task(lease, ())
        now = (await self.now()).steady
        times = {"lease_started_at": now, "lease_expires_at": now + lease_s}
        await self._set_task(lease, times)
        return now + lease_s

    async def finish(self, lease: Lease, error: str | None = None) -> None:
        """leased -> completed, or failed with `error`."""
        state = "completed" if error is None else "failed"
        row = await self._leased_task(lease, state)
        if row is None:
            return

        changes = {**NO_LEASE, "state": state}
        if error is not None:
            changes["error"] = error
            changes["history"] = await self._append_event(row, "failed", lease, error)
        await self._set_task(lease, changes)

    async def retry(self, lease: Lease, error: str, retries: RetryPolicy) -> TaskState:
        row = await self._leased_task(lease, ("queued", "poison"))
        if row is None:
            return (await self.read_task(lease.task.id))[1].state

        num_failures = row["num_failures"] + 1
        state = rules.after_failure(num_failures, retries)
        changes = {
            "state": state,
            "num_failures": num_failures,
            "error": error,
            "history": await self._append_event(row, "retried", lease, error),
        }
        if state == "queued":
            changes["not_before"] = (await self.now()).steady + retries.delay_s(num_failures)
        await self._set_task(lease, {**NO_LEASE, **changes})

        return state

    async def _append_event(
        self, row: Row, kind: Literal["retried", "failed"], lease: Lease, error: str
    ) -> str:
        event = TaskEvent(
            kind=kind,
            worker=lease.worker,
            fencing_id=lease.fencing_id,
            at=(await self.now()).wall,
            error=error,
        )
        return append_event(row, event)

    async def give_back(self, lease: Lease) -> None:
        """leased -> queued, at once and without counting a failure."""
        if await self._leased_task(lease, "queued") is not None:
            await self._set_task(lease, _QUEUED)

    async def requeue_old(self, before: float) -> int:
        """leased -> queued for leases that expired before that moment of the steady clock. Their
        holders are refused from now on."""
        old: list[Condition] = [("state", "=", "leased"), ("lease_expires_at", "<=", before)]
        return await self.update("tasks", old, _QUEUED, _NEW_FENCE)

    async def queue_again(self) -> int:
        """poison, failed -> queued."""
        ended: list[Condition] = [("state", "in", ["poison", "failed"])]
        return await self.update("tasks", ended, _FRESH, _NEW_FENCE)

    async def _places(self, ids: Iterable[str]) -> dict[str, rules.TrajectoryPlace]:
        columns = rules.TrajectoryPlace._fields
        rows = await self.by_key("trajectories", "id", ids, *columns)
        return {
            name: rules.TrajectoryPlace(*(row[column] for column in columns))
            for name, row in rows.items()
        }

    async def _set(self, ids: Iterable[str], **values: object) -> None:
        for chunk in chunks(ids):
            await self.update("trajectories", [("id", "in", chunk)], values)

    async def _is_committed(self, step: int) -> bool:
        return bool(await self.find("steps", ["step"], [("step", "=", step)]))

    async def reserve(self, ids: list[str], step: int) -> int:
        rules.check_reservable(step, committed=await self._is_committed(step))
        moving = rules.moving_to_reserved(ids, await self._places(ids), step)
        await self._set(moving, state="reserved", trained_step=step)
        return len(moving)

    async def commit_step(
        self,
        step: int,
        record: str,
        *,
        ids: Iterable[str] | None,
        dropped: Mapping[str, Sequence[str]],
    ) -> int:
        """`record` is JSON text."""
        for reason, names in dropped.items():
            await self.drop(list(names), reason)

        in_step: list[Condition] = [("trained_step", "=", step)]
        step_ids = {row["id"] for row in await self.find("trajectories", ["id"], in_step)}
        stored = await self.find("steps", ["record"], [("step", "=", step)])
        stored_record = stored[0]["record"] if stored else None
        if not rules.must_commit(
            step, record, stored_record=stored_record, ids=ids, step_ids=step_ids
        ):
            return 0

        values = {
            "step": step,
            "record": record,
            "num_trajectories": len(step_ids),
            "committed_at": (await self.now()).wall,
        }
        await self.insert("steps", [values])
        await self.update("trajectories", in_step, {"state": "committed"})

        return len(step_ids)

    async def release(self, step: int | None) -> int:
        reserved: list[Condition] = [("state", "=", "reserved")]
        if step is not None:
            reserved.append(("trained_step", "=", step))
        return await self.update("trajectories", reserved, _READY)

    async def drop(self, ids: list[str], reason: str) -> int:
        moving = rules.moving_to_dropped(ids, await self._places(ids), reason)
        await self._set(moving, state="dropped", trained_step=None, drop_reason=reason)
        return len(moving)

    async def rewind(self, step: int, *, keep: bool) -> int:
        rules.check_rewind(step, is_committed=await self._is_committed(step))
        return await (self._forget_steps(step) if keep else self._delete_after(step))

    async def _forget_steps(self, step: int) -> int:
        """`Store.rewind` with `keep`: trajectories stay and can be trained on again."""
        num_reset = await self.update("trajectories", [("trained_step", ">", step)], _READY)
        later: list[Condition] = [("step", ">", step), ("state", "=", "dropped")]
        rows = await self.find("trajectories", ["id", self.trajectory_key], later)
        keys = [row[self.trajectory_key] for row in rows]
        with_tokens = await self.by_key("tokens", self.tokens_key, keys)
        ids = [row["id"] for row, key in zip(rows, keys, strict=True) if key in with_tokens]
        await self._set(ids, **_READY, drop_reason=None)
        await self.delete("steps", [("step", ">", step)])
        return num_reset + len(ids)

    async def _delete_after(self, step: int) -> int:
        """`Store.rewind` without `keep`: trajectories that were sampled for later steps are
        deleted."""
        later: list[Condition] = [("step", ">", step)]
        columns = ("id", "task_id", "split", self.trajectory_key)
        rows = await self.find("trajectories", columns, later)
        for chunk in chunks(rows):
            await self.delete_tokens([row[self.trajectory_key] for row in chunk])
            ids = [row["id"] for row in chunk]
            await self.delete("calls", [("trajectory_id", "in", ids)])
            await forget_uses(self, "trajectory", ids)

        await self.delete("trajectories", later)
        await self.update("trajectories", [("trained_step", ">", step)], _READY)
        await self.delete("steps", later)
        await self.update("tasks", [("state", "=", "leased")], _FRESH, _NEW_FENCE)

        for chunk in chunks({row["task_id"] for row in rows if row["split"] == "train"}):
            remaining = await self.by_key("trajectories", "task_id", chunk)
            lost: list[Condition] = [
                ("id", "in", [name for name in chunk if name not in remaining]),
                ("state", "in", ["completed", "failed"]),
            ]
            await self.update("tasks", lost, _FRESH, _NEW_FENCE)

        return len(rows)

    async def read_calls(
        self,
        trajectory_id: str | None,
        state: CallState | None,
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredCall]]:
        """At most `limit` matching (seq, call), with seq in `seqs` unless that is None."""
        now = (await self.now()).steady
        first = now - LOST_S
        last = now + CLOCK_TOLERANCE_S
        where = within(seqs)
        if trajectory_id is not None:
            where.append(("trajectory_id", "=", trajectory_id))
        if state == "ended":
            where.append(("seen_at", "=", None))
        elif state == "running":
            where += [("seen_at", ">=", first), ("seen_at", "<=", last)]
        elif state == "lost":
            where += [("seen_at", "!=", None), ("seen_at", "outside", (first, last))]

        rows = await self.find(
            "calls", where=where, order="seq", descending=newest_first, limit=limit
        )
        return [(row["seq"], decode_call(row, now)) for row in rows]

    async def renew_calls(self, recorder: str) -> None:
        """Marks the calls of this recorder that have not ended as running."""
        running: list[Condition] = [("seen_at", "!=", None), ("id", "starts", f"{recorder}-")]
        await self.update("calls", running, {"seen_at": (await self.now()).steady})


def append_event(row: Row, event: TaskEvent) -> str:
    """The history of the task's row with another event."""
    return encode_history([*decode_history(row["history"]), event])


def expire_lease(row: Row, at: float, retries: RetryPolicy) -> dict[str, Any]:
    """What changes in the row of a task whose lease expired, when the next worker requests a task.
    `state` is leased, or poison at the bound of the policy. `at` is Unix time."""
    event = TaskEvent(
        kind="expired",
        worker=row["worker"] or "",
        fencing_id=row["fencing_id"],
        at=at,
        error="the lease ran out: its worker may have died",
    )
    count = row["num_expiries"] + 1
    changes = {"state": "leased", "num_expiries": count, "history": append_event(row, event)}
    if count < retries.max_expiries:
        return changes

    error = f"its leases ran out {count} times: {event.error}"
    return {**NO_LEASE, **changes, "state": "poison", "error": error}
