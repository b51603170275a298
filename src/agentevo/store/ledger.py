"""The ledger's transitions of trajectories and steps in SQL (store.py has the state diagram), on a
connection that may write. The caller is responsible for transactions, and `rules` has the refusals.
Repeating a transition changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.store import call_rows, rules
from agentevo.store.codec import decode_step
from agentevo.store.queries import rows_by_id
from agentevo.store.records import StepRecord
from agentevo.store.streams import chunks
from agentevo.store.tables import calls, steps, tasks, tokens, trajectories

_READY = {"state": "ready", "trained_step": None}


async def reserve(connection: AsyncConnection, ids: Iterable[str], step: int) -> int:
    rules.check_reservable(
        step,
        committed=await connection.scalar(select(steps.c.step).where(steps.c.step == step))
        is not None,
    )
    names = list(ids)
    seqs, places = await _places(connection, names)
    moving = rules.moving_to_reserved(names, places, step)
    await _set(connection, [seqs[name] for name in moving], state="reserved", trained_step=step)
    return len(moving)


async def commit_step(
    connection: AsyncConnection,
    step: int,
    record: str,
    *,
    ids: Iterable[str] | None,
    dropped: Mapping[str, Sequence[str]],
    now: float,
) -> int:
    """`record` is JSON text, `now` is Unix time."""
    for reason, names in dropped.items():
        await drop(connection, names, reason)

    step_ids = set(
        (
            await connection.execute(
                select(trajectories.c.id).where(trajectories.c.trained_step == step)
            )
        ).scalars()
    )
    stored_record = await connection.scalar(select(steps.c.record).where(steps.c.step == step))
    if not rules.must_commit(step, record, stored_record=stored_record, ids=ids, step_ids=step_ids):
        return 0

    values = {
        "step": step,
        "record": record,
        "num_trajectories": len(step_ids),
        "committed_at": now,
    }
    await connection.execute(insert(steps).values(values))
    await connection.execute(
        update(trajectories).where(trajectories.c.trained_step == step).values(state="committed")
    )

    return len(step_ids)


async def release(connection: AsyncConnection, step: int | None) -> int:
    reserved = trajectories.c.state == "reserved"
    where = reserved if step is None else reserved & (trajectories.c.trained_step == step)
    return (await connection.execute(update(trajectories).where(where).values(_READY))).rowcount


async def drop(connection: AsyncConnection, ids: Iterable[str], reason: str) -> int:
    names = list(ids)
    seqs, places = await _places(connection, names)
    moving = rules.moving_to_dropped(names, places, reason)
    await _set(
        connection,
        [seqs[name] for name in moving],
        state="dropped",
        trained_step=None,
        drop_reason=reason,
    )
    return len(moving)


async def rewind(connection: AsyncConnection, step: int, *, keep: bool) -> int:
    stored_step = await connection.scalar(select(steps.c.step).where(steps.c.step == step))
    rules.check_rewind(step, is_committed=stored_step is not None)
    return await _forget_steps(connection, step) if keep else await _delete_after(connection, step)


async def _forget_steps(connection: AsyncConnection, step: int) -> int:
    """`Store.rewind` with `keep`: trajectories stay and can be trained on again."""
    taken = update(trajectories).where(trajectories.c.trained_step > step).values(_READY)
    has_tokens = exists().where(tokens.c.trajectory_seq == trajectories.c.seq)
    dropped = update(trajectories).where(
        trajectories.c.step > step, trajectories.c.state == "dropped", has_tokens
    )
    num_reset = (await connection.execute(taken)).rowcount
    num_reset += (await connection.execute(dropped.values(_READY | {"drop_reason": None}))).rowcount
    await connection.execute(delete(steps).where(steps.c.step > step))
    return num_reset


async def _delete_after(connection: AsyncConnection, step: int) -> int:
    """`Store.rewind` without `keep`: trajectories that were sampled for later steps are deleted."""
    orphaned = select(trajectories.c.task_id).where(
        trajectories.c.step > step, trajectories.c.split == "train"
    )  # DISTINCT would make SQLite walk over all tasks
    task_ids = dict.fromkeys((await connection.execute(orphaned)).scalars())
    await call_rows.delete_after(connection, step)

    deleted = (
        await connection.execute(delete(trajectories).where(trajectories.c.step > step))
    ).rowcount
    await connection.execute(
        update(trajectories).where(trajectories.c.trained_step > step).values(_READY)
    )
    await connection.execute(delete(steps).where(steps.c.step > step))
    queue = update(tasks).values(
        state="queued",
        fencing_id=tasks.c.fencing_id + 1,
        num_failures=0,
        num_expiries=0,
        not_before=0.0,
        worker=None,
        lease_started_at=None,
        lease_expires_at=None,
        error=None,
    )
    await connection.execute(queue.where(tasks.c.state == "leased"))
    for name in task_ids:
        finished = tasks.c.state.in_(("completed", "failed"))
        lost_all = ~exists().where(trajectories.c.task_id == name)
        await connection.execute(queue.where(tasks.c.id == name, finished, lost_all))

    return deleted


async def delete_dropped_tokens(connection: AsyncConnection) -> int:
    """Deletes the tokens of dropped trajectories that no trainer will read again. Two kinds are
    kept. `rewind` makes trajectories ready again that were sampled for a step after the last
    committed one. A dropped greedy attempt is read again with a group that another step has
    reserved or may use."""
    last = await connection.scalar(select(func.max(steps.c.step))) or 0
    sibling = trajectories.alias()
    in_use = exists().where(
        sibling.c.task_id == trajectories.c.task_id,
        sibling.c.split == trajectories.c.split,
        sibling.c.state.in_(("ready", "reserved")),
    )
    spent = select(trajectories.c.seq).where(
        trajectories.c.state == "dropped", trajectories.c.step <= last, ~in_use
    )
    return (
        await connection.execute(delete(tokens).where(tokens.c.trajectory_seq.in_(spent)))
    ).rowcount


async def delete_orphans(connection: AsyncConnection) -> int:
    """Deletes tokens without a trajectory. A foreign key forbids them, so only another program can
    have left them."""
    owner = exists().where(trajectories.c.seq == tokens.c.trajectory_seq)
    return (await connection.execute(delete(tokens).where(~owner))).rowcount


async def clear(connection: AsyncConnection) -> int:
    counts = [
        (await connection.execute(delete(table))).rowcount
        for table in (calls, tokens, trajectories, tasks, steps)
    ]
    return sum(counts[2:])


async def read_steps(
    connection: AsyncConnection,
    *,
    after: int | None = None,
    limit: int | None = None,
    last_only: bool = False,
) -> list[StepRecord]:
    query = (
        select(steps).order_by(steps.c.step.desc()).limit(1)
        if last_only
        else select(steps).order_by(steps.c.step)
    )
    if after is not None:
        query = query.where(steps.c.step > after)
    if limit is not None:
        query = query.limit(limit)

    return [decode_step(row._mapping) for row in await connection.execute(query)]


async def _places(
    connection: AsyncConnection, ids: Iterable[str]
) -> tuple[dict[str, int], dict[str, rules.TrajectoryPlace]]:
    """Two mappings, id -> seq and id -> place. Unknown ids are absent."""
    rows = await rows_by_id(
        connection,
        trajectories,
        ["seq", "split", "state", "trained_step", "drop_reason"],
        dict.fromkeys(ids),
    )
    places = {
        name: rules.TrajectoryPlace(row.split, row.state, row.trained_step, row.drop_reason)
        for name, row in rows.items()
    }
    return {name: row.seq for name, row in rows.items()}, places


async def _set(connection: AsyncConnection, seqs: list[int], **values: Any) -> None:
    for chunk in chunks(seqs):
        await connection.execute(
            update(trajectories).where(trajectories.c.seq.in_(chunk)).values(values)
        )
