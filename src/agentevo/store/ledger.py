"""The ledger's transitions in SQL (drawn in store.py), on a connection that already holds the write lock. Transactions are the caller's.

Each function first reads the rows that it is about to move and refuses, naming one of them, if any is not where the transition starts; so a
refusal leaves everything as it was. Repeating a transition that has happened changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, exists, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import StoreError
from agentevo.store.codec import decode_task
from agentevo.store.facts import rows_by_id
from agentevo.store.store import Lease, StepRecord
from agentevo.store.tables import steps, tasks, trajectories

_READY = {"state": "ready", "trained_step": None}


async def lease_task(connection: AsyncConnection, worker: str, *, now: float, lease_s: float) -> Lease | None:
    expired = select(tasks).where(tasks.c.state == "leased", tasks.c.lease_expires_at <= now).order_by(tasks.c.lease_expires_at).limit(1)
    queued = select(tasks).where(tasks.c.state == "queued").order_by(tasks.c.seq).limit(1)
    row = (await connection.execute(expired)).first() or (await connection.execute(queued)).first()
    if row is None:
        return None
    lease = Lease(
        task=decode_task(row.task), fencing_id=row.fencing_id + 1, attempt=row.num_leases + 1, worker=worker, expires_at=now + lease_s
    )
    await connection.execute(
        update(tasks)
        .where(tasks.c.seq == row.seq)
        .values(state="leased", fencing_id=lease.fencing_id, num_leases=lease.attempt, worker=worker, lease_expires_at=lease.expires_at)
    )
    return lease


async def finish_task(connection: AsyncConnection, lease: Lease, *, error: str | None) -> None:
    """leased -> completed, or failed with `error`."""
    name, state = lease.task.id, "completed" if error is None else "failed"
    row = (await connection.execute(select(tasks.c.state, tasks.c.fencing_id, tasks.c.worker).where(tasks.c.id == name))).first()
    if row is None:
        raise StoreError(f"no task {name!r} in this store, but {lease.worker!r} holds a lease on it: was the store replaced?")
    if row.fencing_id != lease.fencing_id:
        raise StoreError(
            f"task {name!r}: the lease {lease.fencing_id} of {lease.worker!r} ran out and the task has moved on "
            f"(fencing id {row.fencing_id}): discard this attempt, or lease for longer"
        )
    if row.state == state:
        return
    if row.state != "leased":
        raise StoreError(f"task {name!r} is already {row.state} and can't become {state}")
    await connection.execute(update(tasks).where(tasks.c.id == name).values(state=state, error=error, worker=None, lease_expires_at=None))


async def reserve(connection: AsyncConnection, ids: Iterable[str], step: int) -> int:
    if await connection.scalar(select(steps.c.step).where(steps.c.step == step)) is not None:
        raise StoreError(f"step {step} is already committed: nothing can be reserved for it")
    wanted = list(dict.fromkeys(ids))
    rows = await rows_by_id(connection, trajectories, ["seq", "split", "state", "trained_step"], wanted)
    moving = []
    for name in wanted:
        row = rows.get(name)
        if row is None:
            raise StoreError(f"trajectory {name!r} can't be reserved for step {step}: it is not in the store; write it first")
        if row.split != "train":
            raise StoreError(
                f"trajectory {name!r} can't be reserved for step {step}: its split is {row.split!r}, only 'train' is trained on"
            )
        if row.state == "ready":
            moving.append(row.seq)
        elif (row.state, row.trained_step) != ("reserved", step):
            at = "" if row.trained_step is None else f"({row.trained_step})"
            raise StoreError(f"trajectory {name!r} can't be reserved for step {step}: it is {row.state}{at}, not ready")
    await _set(connection, moving, state="reserved", trained_step=step)
    return len(moving)


async def commit_step(connection: AsyncConnection, step: int, record: str, *, ids: Iterable[str] | None, now: float) -> int:
    """`record` is JSON text."""
    of_step = select(trajectories.c.id, trajectories.c.state).where(trajectories.c.trained_step == step)
    here = {row.id: row.state for row in await connection.execute(of_step)}
    if ids is not None:
        _refuse_other_ids(step, wanted=set(ids), here=set(here))
    known = await connection.scalar(select(steps.c.record).where(steps.c.step == step))
    if known is not None and known != record:
        raise StoreError(f"step {step} is already committed with another record: rewind to step {step - 1} before doing it again")
    if known is not None:
        return 0
    values = {"step": step, "record": record, "num_trajectories": len(here), "committed_at": now}
    await connection.execute(insert(steps).values(values))
    await connection.execute(update(trajectories).where(trajectories.c.trained_step == step).values(state="committed"))
    return len(here)


def _refuse_other_ids(step: int, *, wanted: set[str], here: set[str]) -> None:
    for problem, names in (("is not reserved for it", wanted - here), ("is reserved for it but not part of it", here - wanted)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise StoreError(f"step {step} can't be committed: trajectory {min(names)!r}{more} {problem}")


async def release(connection: AsyncConnection, step: int | None) -> int:
    reserved = trajectories.c.state == "reserved"
    where = reserved if step is None else reserved & (trajectories.c.trained_step == step)
    return (await connection.execute(update(trajectories).where(where).values(_READY))).rowcount


async def drop(connection: AsyncConnection, ids: Iterable[str], reason: str) -> int:
    wanted = list(dict.fromkeys(ids))
    rows = await rows_by_id(connection, trajectories, ["seq", "state", "trained_step", "drop_reason"], wanted)
    moving = []
    for name in wanted:
        row = rows.get(name)
        if row is None:
            raise StoreError(f"trajectory {name!r} can't be dropped ({reason}): it is not in the store; write it first")
        if row.state == "committed":
            raise StoreError(f"trajectory {name!r} can't be dropped ({reason}): step {row.trained_step} was trained on it")
        if row.state == "dropped" and row.drop_reason != reason:
            raise StoreError(f"trajectory {name!r} can't be dropped ({reason}): it was dropped before ({row.drop_reason})")
        if row.state in ("ready", "reserved"):
            moving.append(row.seq)
    await _set(connection, moving, state="dropped", trained_step=None, drop_reason=reason)
    return len(moving)


async def rewind(connection: AsyncConnection, step: int) -> int:
    known = select(steps.c.step).where(steps.c.step == step)
    if step > 0 and await connection.scalar(known) is None:
        raise StoreError(f"can't rewind to step {step}: it was never committed; `steps()` lists those that were")
    orphaned = select(trajectories.c.task_id).where(trajectories.c.step > step).distinct()
    task_ids = list((await connection.execute(orphaned)).scalars())
    deleted = (await connection.execute(delete(trajectories).where(trajectories.c.step > step))).rowcount
    await connection.execute(update(trajectories).where(trajectories.c.trained_step > step).values(_READY))
    await connection.execute(delete(steps).where(steps.c.step > step))
    queue = update(tasks).values(state="queued", fencing_id=tasks.c.fencing_id + 1, worker=None, lease_expires_at=None, error=None)
    await connection.execute(queue.where(tasks.c.state == "leased"))
    for name in task_ids:
        finished = tasks.c.state.in_(("completed", "failed"))
        lost_all = ~exists().where(trajectories.c.task_id == name)
        await connection.execute(queue.where(tasks.c.id == name, finished, lost_all))
    return deleted


async def _set(connection: AsyncConnection, seqs: list[int], **values: Any) -> None:
    if seqs:
        statement = update(trajectories).where(trajectories.c.seq == bindparam("at")).values(values)
        await connection.execute(statement, [{"at": seq} for seq in seqs])


async def read_steps(connection: AsyncConnection, *, last_only: bool) -> list[StepRecord]:
    query = select(steps).order_by(steps.c.step.desc()).limit(1) if last_only else select(steps).order_by(steps.c.step)
    return [
        StepRecord(
            step=row.step,
            record=msgspec.json.decode(row.record, type=dict[str, Any]),
            num_trajectories=row.num_trajectories,
            committed_at=row.committed_at,
        )
        for row in await connection.execute(query)
    ]
