"""Leases of tasks in SQL (store.py has the state diagram), on a connection that may write. The
caller is responsible for transactions, and `rules` has the refusals.

Rows that will change are read `FOR UPDATE`, and rows that another worker is leasing are skipped. So
on PostgreSQL many workers can lease at the same time. SQLite ignores both clauses and has a single
writer anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Float, Integer, Select, Update, bindparam, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.store import rules
from agentevo.store.clock import CLOCK_TOLERANCE_S, Now
from agentevo.store.codec import decode_history, decode_lease, encode_history
from agentevo.store.records import Lease, RetryPolicy, TaskEvent, TaskState
from agentevo.store.tables import BIG, tasks

_NO_LEASE: dict[str, Any] = {
    "worker": None,
    "lease_started_at": None,
    "lease_expires_at": None,
    "not_before": 0.0,
}

# These statements are built once, because SQLAlchemy takes longer to build a statement than SQLite
# takes to execute it.
_QUEUED = (
    select(tasks)
    .where(tasks.c.state == "queued")
    .with_for_update(skip_locked=True)
    .limit(bindparam("limit", type_=Integer))
)
_DUE = _QUEUED.where(
    tasks.c.not_before > 0.0, tasks.c.not_before <= bindparam("now", type_=Float)
).order_by(tasks.c.not_before, tasks.c.seq)
_FRESH = _QUEUED.where(tasks.c.not_before == 0.0).order_by(tasks.c.seq)
_EXPIRED = (
    select(tasks)
    .where(tasks.c.state == "leased", tasks.c.lease_expires_at <= bindparam("now", type_=Float))
    .where(
        tuple_(tasks.c.lease_expires_at, tasks.c.seq)
        > tuple_(bindparam("after", type_=Float), bindparam("after_seq", type_=BIG))
    )
    .order_by(tasks.c.lease_expires_at, tasks.c.seq)
    .limit(bindparam("limit", type_=Integer))
    .with_for_update(skip_locked=True)
)
_PLACE = (
    select(tasks.c.state, tasks.c.fencing_id).where(tasks.c.id == bindparam("at")).with_for_update()
)
_COMPLETE = (
    update(tasks).where(tasks.c.id == bindparam("at")).values(_NO_LEASE | {"state": "completed"})
)


async def lease_tasks(
    connection: AsyncConnection,
    worker: str,
    *,
    now: Now,
    lease_s: float,
    limit: int,
    retries: RetryPolicy,
) -> list[Lease]:
    taken = await _take_expired(
        connection, worker, now=now, lease_s=lease_s, limit=limit, retries=retries
    )
    for query, values in ((_DUE, {"now": now.steady}), (_FRESH, {})):
        if len(taken) < limit:
            rows = await _rows(connection, query, limit=limit - len(taken), **values)
            taken += [(row, {}) for row in rows]

    if not taken:
        await _restart_future_leases(connection, now=now, retries=retries)

    leases = [decode_lease(row, worker, now=now.steady, lease_s=lease_s) for row, _ in taken]
    changes = {
        "state": "leased",
        "worker": worker,
        "lease_started_at": now.steady,
        "lease_expires_at": now.steady + lease_s,
        "not_before": 0.0,
    }
    task_changes = [
        {
            "num_expiries": row["num_expiries"],
            "history": row["history"],
            **expired,
            "fencing_id": lease.fencing_id,
            "num_leases": lease.attempt,
        }
        for lease, (row, expired) in zip(leases, taken, strict=True)
    ]
    await _update(
        connection,
        [(row, changes | change) for (row, _), change in zip(taken, task_changes, strict=True)],
    )

    return leases


async def _take_expired(
    connection: AsyncConnection,
    worker: str,
    *,
    now: Now,
    lease_s: float,
    limit: int,
    retries: RetryPolicy,
) -> list[tuple[Mapping[Any, Any], dict[str, Any]]]:
    """Up to `limit` tasks whose lease expired, as (row, changes in addition to the lease). Tasks
    with too many expired leases become poison."""
    taken: list[tuple[Mapping[Any, Any], dict[str, Any]]] = []
    after = (-math.inf, 0)
    while len(taken) < limit:
        rows = await _rows(
            connection,
            _EXPIRED,
            now=now.steady,
            limit=limit - len(taken),
            after=after[0],
            after_seq=after[1],
        )
        if not rows:
            break

        # Continues from a position, not from an offset: if another worker unlocks a row, an offset
        # would skip rows behind it.
        after = max((row["lease_expires_at"], row["seq"]) for row in rows)
        poisoned = []
        for row in rows:
            event = rules.expired_event(row["worker"], row["fencing_id"], now.wall)
            changes = {
                "num_expiries": row["num_expiries"] + 1,
                "history": _append_event(row["history"], event),
            }
            if rules.after_expiry(row["num_expiries"] + 1, retries) == "leased":
                taken.append((row, changes))
            else:
                error = f"its leases ran out {row['num_expiries'] + 1} times: {event.error}"
                poisoned.append((row, _NO_LEASE | changes | {"state": "poison", "error": error}))

        await _update(connection, poisoned)

    return taken


async def _restart_future_leases(
    connection: AsyncConnection, *, now: Now, retries: RetryPolicy
) -> None:
    """Shortens leases and delays that are too long because the clock was set back, or started again
    at a reboot: see clock.py."""
    length = tasks.c.lease_expires_at - tasks.c.lease_started_at
    late = update(tasks).where(
        tasks.c.state == "leased", tasks.c.lease_started_at > now.steady + CLOCK_TOLERANCE_S
    )
    await connection.execute(
        late.values(lease_started_at=now.steady, lease_expires_at=now.steady + length)
    )
    waiting = update(tasks).where(
        tasks.c.state == "queued", tasks.c.not_before > now.steady + retries.max_delay_s
    )
    await connection.execute(waiting.values(not_before=now.steady + retries.max_delay_s))


async def renew(connection: AsyncConnection, lease: Lease, *, now: Now, lease_s: float) -> float:
    """Renews the lease and returns its new expiry time."""
    row = await _place(connection, lease)
    rules.must_change(row, lease, ())
    expires_at = now.steady + lease_s
    values = {"lease_started_at": now.steady, "lease_expires_at": expires_at}
    await connection.execute(update(tasks).where(tasks.c.id == lease.task.id).values(values))
    return expires_at


async def finish(connection: AsyncConnection, lease: Lease, *, error: str | None, now: Now) -> None:
    """leased -> completed, or failed with `error`."""
    state = "completed" if error is None else "failed"
    if rules.must_change(await _place(connection, lease), lease, state):
        if error is None:
            await connection.execute(_COMPLETE, {"at": lease.task.id})
            return

        event = TaskEvent(
            kind="failed",
            worker=lease.worker,
            fencing_id=lease.fencing_id,
            at=now.wall,
            error=error,
        )
        changes = {
            "state": state,
            "error": error,
            "history": _append_event(await _history(connection, lease), event),
        }
        await connection.execute(
            update(tasks).where(tasks.c.id == lease.task.id).values(_NO_LEASE | changes)
        )


async def retry(
    connection: AsyncConnection, lease: Lease, error: str, *, now: Now, retries: RetryPolicy
) -> TaskState:
    row = await _place(connection, lease)
    if not rules.must_change(row, lease, ("queued", "poison")):
        return "poison" if row is not None and row.state == "poison" else "queued"

    query = select(tasks.c.num_failures, tasks.c.history).where(tasks.c.id == lease.task.id)
    counts = (await connection.execute(query)).one()
    num_failures = counts.num_failures + 1
    state = rules.after_failure(num_failures, retries)
    event = TaskEvent(
        kind="retried", worker=lease.worker, fencing_id=lease.fencing_id, at=now.wall, error=error
    )
    changes = {
        "state": state,
        "num_failures": num_failures,
        "error": error,
        "history": _append_event(counts.history, event),
        "not_before": now.steady + retries.delay_s(num_failures) if state == "queued" else 0.0,
    }
    await connection.execute(
        update(tasks).where(tasks.c.id == lease.task.id).values(_NO_LEASE | changes)
    )

    return state


async def give_back(connection: AsyncConnection, lease: Lease) -> None:
    """leased -> queued, at once and without counting a failure."""
    if rules.must_change(await _place(connection, lease), lease, "queued"):
        await connection.execute(
            update(tasks).where(tasks.c.id == lease.task.id).values(_NO_LEASE | {"state": "queued"})
        )


async def requeue_old(connection: AsyncConnection, before: float) -> int:
    """leased -> queued for leases that expired before that moment of the steady clock. Their
    holders are refused from now on."""
    old = update(tasks).where(tasks.c.state == "leased", tasks.c.lease_expires_at <= before)
    return (
        await connection.execute(
            old.values(_NO_LEASE | {"state": "queued", "fencing_id": tasks.c.fencing_id + 1})
        )
    ).rowcount


async def queue_again(connection: AsyncConnection) -> int:
    """poison, failed -> queued."""
    fresh = _NO_LEASE | {
        "state": "queued",
        "fencing_id": tasks.c.fencing_id + 1,
        "num_failures": 0,
        "num_expiries": 0,
        "error": None,
    }
    return (
        await connection.execute(
            update(tasks).where(tasks.c.state.in_(("poison", "failed"))).values(fresh)
        )
    ).rowcount


def _append_event(history: str, event: TaskEvent) -> str:
    return encode_history([*decode_history(history), event])


async def _rows(
    connection: AsyncConnection, query: Select[Any], **values: float
) -> list[Mapping[Any, Any]]:
    return [row._mapping for row in await connection.execute(query, values)]


async def _place(connection: AsyncConnection, lease: Lease) -> rules.TaskPlace | None:
    row = (await connection.execute(_PLACE, {"at": lease.task.id})).first()
    return None if row is None else rules.TaskPlace(row.state, row.fencing_id)


async def _history(connection: AsyncConnection, lease: Lease) -> str:
    return str(await connection.scalar(select(tasks.c.history).where(tasks.c.id == lease.task.id)))


async def _update(
    connection: AsyncConnection, changes: list[tuple[Mapping[Any, Any], dict[str, Any]]]
) -> None:
    """Updates each row with its values. All rows name the same columns."""
    if changes:
        await connection.execute(
            _changing(tuple(changes[0][1])),
            [
                {"at": row["seq"]} | {f"new_{name}": value for name, value in values.items()}
                for row, values in changes
            ],
        )


@cache
def _changing(names: tuple[str, ...]) -> Update:
    """The update of one row. Its parameters are `at`, the row's seq, and `new_NAME` for each
    column."""
    return (
        update(tasks)
        .where(tasks.c.seq == bindparam("at"))
        .values({name: bindparam(f"new_{name}") for name in names})
    )
