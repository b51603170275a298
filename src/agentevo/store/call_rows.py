"""Calls in SQL, on an open connection. The caller is responsible for transactions and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, exists, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.store.calls import COLUMNS, LOST_S, CallState, StoredCall, decode_call
from agentevo.store.clock import CLOCK_TOLERANCE_S, Now
from agentevo.store.streams import chunks
from agentevo.store.tables import calls, tokens, trajectories

_WRITTEN = (*COLUMNS, "seen_at")
_CHANGING = ("ended_at", "status", "error", "attributes", "seen_at")
_UPSERT = text(
    f"INSERT INTO calls ({', '.join(_WRITTEN)}) VALUES ({', '.join(f':{n}' for n in _WRITTEN)}) "
    "ON CONFLICT (trajectory_id, id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
).bindparams(*(bindparam(name, type_=calls.c[name].type) for name in _WRITTEN))


async def upsert(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Writes calls. If a call exists, its row gets the new end, status and attributes."""
    await connection.execute(_UPSERT, list(rows))


async def insert_new(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> int:
    """Inserts calls, and leaves existing ones unchanged. Returns the number of new calls."""
    stored_keys: set[tuple[str, str]] = set()
    for chunk in chunks({row["trajectory_id"] for row in rows}):
        query = select(calls.c.trajectory_id, calls.c.id).where(calls.c.trajectory_id.in_(chunk))
        stored_keys.update((row.trajectory_id, row.id) for row in await connection.execute(query))

    new = {(row["trajectory_id"], row["id"]): row for row in rows}
    for key in stored_keys:
        new.pop(key, None)

    if new:
        await connection.execute(insert(calls), list(new.values()))

    return len(new)


async def renew(connection: AsyncConnection, recorder: str, now: Now) -> None:
    """Marks the calls of this recorder that have not ended as running."""
    is_own = calls.c.seen_at.is_not(None) & calls.c.id.like(f"{recorder}-%")
    await connection.execute(update(calls).where(is_own).values(seen_at=now.steady))


def _in_state(state: CallState, now: Now) -> ColumnElement[bool]:
    if state == "ended":
        return calls.c.seen_at.is_(None)
    just_seen = calls.c.seen_at.between(now.steady - LOST_S, now.steady + CLOCK_TOLERANCE_S)
    return calls.c.seen_at.is_not(None) & (just_seen if state == "running" else ~just_seen)


async def newest_seq(connection: AsyncConnection) -> int:
    return await connection.scalar(select(func.max(calls.c.seq))) or 0


async def count(connection: AsyncConnection) -> int:
    return await connection.scalar(select(func.count()).select_from(calls)) or 0


async def read_page(
    connection: AsyncConnection,
    trajectory_id: str | None,
    state: CallState | None,
    *,
    seqs: range | None,
    limit: int,
    newest_first: bool,
    now: Now,
) -> list[tuple[int, StoredCall]]:
    """At most `limit` matching (seq, call), with seq in `seqs` unless that is None."""
    query = select(calls)
    if trajectory_id is not None:
        query = query.where(calls.c.trajectory_id == trajectory_id)
    if state is not None:
        query = query.where(_in_state(state, now))
    if seqs is not None:
        query = query.where(calls.c.seq >= seqs.start, calls.c.seq < seqs.stop)

    query = query.order_by(calls.c.seq.desc() if newest_first else calls.c.seq).limit(limit)
    rows = await connection.execute(query)
    return [(row.seq, decode_call(row._mapping, now.steady)) for row in rows]


async def delete_abandoned(connection: AsyncConnection, now: Now, grace_s: float) -> int:
    """Deletes calls that are not running, of attempts that started longer ago than the grace period
    and never became a trajectory."""
    owner = exists().where(trajectories.c.id == calls.c.trajectory_id)
    where = (calls.c.started_at < now.wall - grace_s) & ~_in_state("running", now)
    return (await connection.execute(delete(calls).where(where, ~owner))).rowcount


async def delete_of_emptied(connection: AsyncConnection) -> int:
    """Deletes the calls of dropped trajectories whose turns are deleted."""
    has_turns = exists().where(tokens.c.trajectory_seq == trajectories.c.seq)
    emptied = select(trajectories.c.id).where(trajectories.c.state == "dropped", ~has_turns)
    return (
        await connection.execute(delete(calls).where(calls.c.trajectory_id.in_(emptied)))
    ).rowcount


async def delete_after(connection: AsyncConnection, step: int) -> None:
    """Deletes the calls of trajectories that were sampled for later steps."""
    later = select(trajectories.c.id).where(trajectories.c.step > step)
    await connection.execute(delete(calls).where(calls.c.trajectory_id.in_(later)))
