"""Tasks, trajectories and turns in SQL: bulk inserts and reads on an open connection. Transactions and deadlines are the caller's.

Inserts are idempotent by id: a row that is there with the same digest is skipped, one with another digest is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Row, Select, Table, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import StoreError
from agentevo.store.codec import EncodedTask, EncodedTrajectory, decode_stored, decode_summary, decode_task, decode_turn
from agentevo.store.store import SPLITS, TASK_STATES, TRAJECTORY_STATES, StoredTrajectory, TrajectorySummary
from agentevo.store.tables import steps, tasks, trajectories, turns
from agentevo.types import Task, Turn

CHUNK = 500
"""Ids in one IN list: below every database's limit on bound parameters."""

T = TypeVar("T")
Encoded = TypeVar("Encoded", EncodedTask, EncodedTrajectory)

_SUMMARY_COLUMNS = [column for column in trajectories.c if column.name in TrajectorySummary.__struct_fields__]


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


async def rows_by_id(connection: AsyncConnection, table: Table, columns: Sequence[str], ids: Iterable[str]) -> dict[str, Row[Any]]:
    """id -> its row, with `columns` and the id; unknown ids are absent."""
    found: dict[str, Row[Any]] = {}
    for chunk in chunks(ids):
        query = select(table.c.id, *(table.c[name] for name in columns)).where(table.c.id.in_(chunk))
        found.update((row.id, row) for row in await connection.execute(query))
    return found


async def _not_there_yet(connection: AsyncConnection, table: Table, items: Sequence[Encoded]) -> list[Encoded]:
    """The items that must be inserted, each id once. Refuses an id that stands for two contents."""
    known = {name: row.digest for name, row in (await rows_by_id(connection, table, ["digest"], (item.id for item in items))).items()}
    new = []
    for item in items:
        if item.id not in known:
            known[item.id] = item.digest
            new.append(item)
        elif known[item.id] != item.digest:
            raise StoreError(
                f"{table.name}: {item.id!r} is already there with other content: ids must differ for different attempts "
                "(after going back to an older checkpoint, call rewind first)"
            )
    return new


async def insert_tasks(connection: AsyncConnection, items: Sequence[EncodedTask]) -> int:
    new = await _not_there_yet(connection, tasks, items)
    if new:
        await connection.execute(insert(tasks), [item.row for item in new])
    return len(new)


async def insert_trajectories(connection: AsyncConnection, items: Sequence[EncodedTrajectory], now: float) -> int:
    new = await _not_there_yet(connection, trajectories, items)
    if not new:
        return 0
    await connection.execute(insert(trajectories), [item.row | {"written_at": now} for item in new])
    rows = await rows_by_id(connection, trajectories, ["seq"], (item.id for item in new))
    turn_rows = [turn | {"trajectory_seq": rows[item.id].seq} for item in new for turn in item.turns]
    if turn_rows:
        await connection.execute(insert(turns), turn_rows)
    return len(new)


async def read_task(connection: AsyncConnection, task_id: str) -> Task:
    text = await connection.scalar(select(tasks.c.task).where(tasks.c.id == task_id))
    if text is None:
        raise StoreError(f"no task {task_id!r} in this store: add it with add_tasks")
    return decode_task(text)


async def newest_seq(connection: AsyncConnection) -> int:
    return await connection.scalar(select(func.max(trajectories.c.seq))) or 0


def matching(properties: Mapping[str, object], *columns: Any, newest_first: bool) -> Select[Any]:
    """Rows of `columns` with these properties, in the order of writing."""
    query = select(*columns).where(*(trajectories.c[name] == value for name, value in properties.items()))
    return query.order_by(trajectories.c.seq.desc() if newest_first else trajectories.c.seq)


async def read_page(
    connection: AsyncConnection, properties: Mapping[str, object], *, seqs: range | None, limit: int, newest_first: bool
) -> list[tuple[int, StoredTrajectory]]:
    """At most `limit` matching (seq, trajectory), with seq in `seqs` unless None, with their turns."""
    query = matching(properties, trajectories, newest_first=newest_first).limit(limit)
    if seqs is not None:
        query = query.where(trajectories.c.seq >= seqs.start, trajectories.c.seq < seqs.stop)
    rows = (await connection.execute(query)).all()
    turns_of: dict[int, list[Turn]] = {row.seq: [] for row in rows}
    for chunk in chunks(turns_of):
        turn_query = select(turns).where(turns.c.trajectory_seq.in_(chunk)).order_by(turns.c.trajectory_seq, turns.c.turn_index)
        for turn in await connection.execute(turn_query):
            turns_of[turn.trajectory_seq].append(decode_turn(turn))
    return [(row.seq, decode_stored(row, turns_of[row.seq])) for row in rows]


async def read_summaries(
    connection: AsyncConnection, properties: Mapping[str, object], *, limit: int | None, newest_first: bool
) -> list[TrajectorySummary]:
    query = matching(properties, *_SUMMARY_COLUMNS, newest_first=newest_first).limit(limit)
    return [decode_summary(row) for row in await connection.execute(query)]


async def count(connection: AsyncConnection) -> dict[str, int]:
    counts = {f"tasks/{state}": 0 for state in TASK_STATES}
    counts |= {f"trajectories/{split}/{state}": 0 for split in SPLITS for state in TRAJECTORY_STATES}
    for row in await connection.execute(select(tasks.c.state, func.count().label("n")).group_by(tasks.c.state)):
        counts[f"tasks/{row.state}"] = row.n
    by_state = select(trajectories.c.split, trajectories.c.state, func.count().label("n")).group_by(
        trajectories.c.state, trajectories.c.split
    )
    for row in await connection.execute(by_state):
        counts[f"trajectories/{row.split}/{row.state}"] = row.n
    counts["turns"] = await connection.scalar(select(func.coalesce(func.sum(trajectories.c.num_turns), 0))) or 0
    counts["steps"] = await connection.scalar(select(func.count()).select_from(steps)) or 0
    return counts
