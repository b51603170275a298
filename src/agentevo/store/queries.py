"""Tasks, trajectories and their tokens in SQL: bulk inserts and reads on an open connection. The
caller is responsible for transactions and deadlines.

Inserts are idempotent by id. If the id exists with the same digest, the row is skipped. If it
exists with another digest, the row is refused.

The statements that every attempt needs are built once, because SQLAlchemy takes longer to build a
statement than SQLite takes to execute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Select,
    Table,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import StoreError
from agentevo.store import rules
from agentevo.store.codec import (
    SUMMARY_COLUMNS,
    EncodedTask,
    EncodedTrajectory,
    decode_stored,
    decode_summary,
    decode_task,
)
from agentevo.store.records import (
    SPLITS,
    TASK_STATES,
    TRAJECTORY_STATES,
    Split,
    StoredTask,
    StoredTrajectory,
    TrajectorySummary,
)
from agentevo.store.streams import chunks, whole_groups
from agentevo.store.tables import steps, tasks, tokens, trajectories

Encoded = TypeVar("Encoded", EncodedTask, EncodedTrajectory)

_INSERT_TASKS = insert(tasks)
_INSERT_TRAJECTORIES = insert(trajectories)
_INSERT_TOKENS = insert(tokens)
_NO_LIMIT = 2**31 - 1
"""The number of rows that means no limit."""
_TOKENS = select(tokens).where(tokens.c.trajectory_seq.in_(bindparam("seqs", expanding=True)))


_SELECTIVE_COLUMNS = frozenset({"group_id", "task_id", "step", "trained_step"})
"""Columns in which few rows of a large store share a value."""


def _without_index(column: ColumnElement[str]) -> ColumnElement[str]:
    """The value of a column in a form that no index can use. PostgreSQL analyzes a table that grew
    quickly only later. Until then it takes a split to be as rare as a group, and walks over all
    rows of the split to find those that match both."""
    return func.coalesce(column, "")


@cache
def _by_id(table: Table, columns: tuple[str, ...]) -> Select[Any]:
    return select(table.c.id, *(table.c[name] for name in columns)).where(
        table.c.id.in_(bindparam("ids", expanding=True))
    )


@cache
def _matching(
    columns: tuple[str, ...],
    filled: tuple[str, ...],
    empty: tuple[str, ...],
    *,
    bounded: bool,
    newest_first: bool,
) -> Select[Any]:
    """The rows in the order of writing. Parameters: `limit`, each of `filled` under its own name,
    and `first` and `end` if bounded."""
    query = select(*(trajectories.c[name] for name in columns)).where(
        *(trajectories.c[name].is_(None) for name in empty)
    )
    narrow = _SELECTIVE_COLUMNS.intersection(filled)
    for name in filled:
        column = trajectories.c[name]
        query = query.where(
            (column if name in narrow or not narrow else _without_index(column)) == bindparam(name)
        )

    if bounded:
        query = query.where(
            trajectories.c.seq >= bindparam("first"), trajectories.c.seq < bindparam("end")
        )

    query = query.order_by(trajectories.c.seq.desc() if newest_first else trajectories.c.seq)
    return query.limit(bindparam("limit", type_=Integer))


async def rows_by_id(
    connection: AsyncConnection, table: Table, columns: Sequence[str], ids: Iterable[str]
) -> dict[str, Row[Any]]:
    """Maps an id to its row, with `columns` and the id. Unknown ids are absent."""
    rows: dict[str, Row[Any]] = {}
    for chunk in chunks(ids):
        rows.update(
            (row.id, row)
            for row in await connection.execute(_by_id(table, tuple(columns)), {"ids": chunk})
        )
    return rows


async def _missing_items(
    connection: AsyncConnection, table: Table, items: Sequence[Encoded]
) -> list[Encoded]:
    """The items that must be inserted, each id once. Refuses an id with two contents."""
    stored_digests = {
        name: row.digest
        for name, row in (
            await rows_by_id(connection, table, ["digest"], (item.id for item in items))
        ).items()
    }
    new = []
    for item in items:
        if item.id in stored_digests:
            rules.check_same_content(table.name, item.id, item.digest, stored_digests[item.id])
        else:
            stored_digests[item.id] = item.digest
            new.append(item)

    return new


async def insert_tasks(
    connection: AsyncConnection, items: Sequence[EncodedTask], *, queue: bool = True
) -> int:
    """Inserts the new tasks. `Store.add_tasks` describes a call without `queue`."""
    new = await _missing_items(connection, tasks, items)
    if new:
        await connection.execute(
            _INSERT_TASKS,
            [item.row if queue else item.row | {"state": "completed"} for item in new],
        )

    if not queue:
        for chunk in chunks(item.id for item in items):
            waiting = update(tasks).where(tasks.c.id.in_(chunk), tasks.c.state == "queued")
            await connection.execute(waiting.values(state="completed", not_before=0.0))

    return len(new)


async def insert_trajectories(
    connection: AsyncConnection, items: Sequence[EncodedTrajectory], now: float
) -> int:
    """`now` is Unix time, for rows that don't say when they were written."""
    new = await _missing_items(connection, trajectories, items)
    if not new:
        return 0

    await connection.execute(_INSERT_TRAJECTORIES, [{"written_at": now} | item.row for item in new])
    rows = await rows_by_id(connection, trajectories, ["seq"], (item.id for item in new))
    data = [
        {"trajectory_seq": rows[item.id].seq, "data": item.data}
        for item in new
        if item.data is not None
    ]
    if data:
        await connection.execute(_INSERT_TOKENS, data)

    return len(new)


async def insert_steps(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> int:
    stored_records: dict[int, str] = {}
    for chunk in chunks(row["step"] for row in rows):
        stored = await connection.execute(
            select(steps.c.step, steps.c.record).where(steps.c.step.in_(chunk))
        )
        stored_records.update((row.step, row.record) for row in stored)

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
        await connection.execute(insert(steps), new)

    return len(new)


async def read_task(connection: AsyncConnection, task_id: str) -> tuple[int, StoredTask]:
    """The task as (seq, task)."""
    row = (await connection.execute(select(tasks).where(tasks.c.id == task_id))).first()
    if row is None:
        raise StoreError(f"no task {task_id!r} in this store: add it with add_tasks")
    return row.seq, decode_task(row._mapping)


async def read_tasks(
    connection: AsyncConnection, state: str | None, *, after: int, limit: int
) -> list[tuple[int, StoredTask]]:
    query = (
        select(tasks)
        .where(tasks.c.seq > after, *([tasks.c.state == state] if state else []))
        .order_by(tasks.c.seq)
        .limit(limit)
    )
    return [(row.seq, decode_task(row._mapping)) for row in await connection.execute(query)]


async def newest_seq(connection: AsyncConnection) -> int:
    return await connection.scalar(select(func.max(trajectories.c.seq))) or 0


async def _read(
    connection: AsyncConnection,
    columns: tuple[str, ...],
    properties: Mapping[str, object],
    *,
    seqs: range | None = None,
    limit: int | None,
    newest_first: bool,
) -> Sequence[Row[Any]]:
    """The rows with these properties, in the order of writing."""
    filled = {name: value for name, value in properties.items() if value is not None}
    empty = tuple(name for name in properties if name not in filled)
    query = _matching(
        columns, tuple(filled), empty, bounded=seqs is not None, newest_first=newest_first
    )
    bounds = {} if seqs is None else {"first": seqs.start, "end": seqs.stop}
    values = {**filled, **bounds, "limit": _NO_LIMIT if limit is None else limit}
    rows: Sequence[Row[Any]] = (await connection.execute(query, values)).all()
    return rows


async def read_page(
    connection: AsyncConnection,
    properties: Mapping[str, object],
    *,
    seqs: range | None,
    limit: int,
    newest_first: bool,
) -> list[tuple[int, StoredTrajectory]]:
    """At most `limit` matching (seq, trajectory) with their turns, with seq in `seqs` unless that
    is None."""
    columns = tuple(trajectories.c.keys())
    rows = await _read(
        connection, columns, properties, seqs=seqs, limit=limit, newest_first=newest_first
    )
    data: dict[int, bytes] = {}
    for chunk in chunks(row.seq for row in rows):
        data.update(
            (row.trajectory_seq, row.data)
            for row in await connection.execute(_TOKENS, {"seqs": chunk})
        )

    return [(row.seq, decode_stored(row._mapping, data.get(row.seq))) for row in rows]


async def read_summaries(
    connection: AsyncConnection,
    properties: Mapping[str, object],
    *,
    limit: int | None,
    newest_first: bool,
) -> list[TrajectorySummary]:
    rows = await _read(
        connection, SUMMARY_COLUMNS, properties, limit=limit, newest_first=newest_first
    )
    return [decode_summary(row._mapping) for row in rows]


async def read_numbered_summaries(
    connection: AsyncConnection, seqs: range, *, limit: int
) -> list[tuple[int, TrajectorySummary]]:
    columns = ("seq", *SUMMARY_COLUMNS)
    rows = await _read(connection, columns, {}, seqs=seqs, limit=limit, newest_first=False)
    return [(row.seq, decode_summary(row._mapping)) for row in rows]


async def ready_groups(
    connection: AsyncConnection, split: Split, *, size: int, limit: int
) -> list[str]:
    async def page(after: int, length: int) -> list[tuple[int, str]]:
        query = (
            select(trajectories.c.seq, trajectories.c.group_id)
            .where(
                trajectories.c.state == "ready",
                trajectories.c.split == split,
                trajectories.c.seq > after,
            )
            .order_by(trajectories.c.seq)
            .limit(length)
        )
        return [(row.seq, row.group_id) for row in await connection.execute(query)]

    async def members(groups: list[str]) -> list[tuple[str, str]]:
        states: list[tuple[str, str]] = []
        for chunk in chunks(groups):
            rows = await connection.execute(
                select(trajectories.c.group_id, trajectories.c.state).where(
                    trajectories.c.group_id.in_(chunk),
                    _without_index(trajectories.c.split) == split,
                )
            )
            states += [(row.group_id, row.state) for row in rows]

        return states

    return await whole_groups(page, members, size=size, limit=limit)


async def outstanding(connection: AsyncConnection, split: Split) -> int:
    waiting = select(func.count()).select_from(tasks).where(tasks.c.state.in_(("queued", "leased")))
    untrained = select(func.count(trajectories.c.task_id.distinct())).where(
        trajectories.c.state.in_(("ready", "reserved")), trajectories.c.split == split
    )
    return int(await connection.scalar(waiting) or 0) + int(await connection.scalar(untrained) or 0)


async def count(connection: AsyncConnection) -> dict[str, int]:
    counts = {f"tasks/{state}": 0 for state in TASK_STATES}
    counts |= {
        f"trajectories/{split}/{state}": 0 for split in SPLITS for state in TRAJECTORY_STATES
    }
    for row in await connection.execute(
        select(tasks.c.state, func.count().label("n")).group_by(tasks.c.state)
    ):
        counts[f"tasks/{row.state}"] = row.n

    place = (trajectories.c.state, trajectories.c.split)
    counts["turns"] = 0
    for row in await connection.execute(
        select(
            *place, func.count().label("n"), func.sum(trajectories.c.num_turns).label("turns")
        ).group_by(*place)
    ):
        counts[f"trajectories/{row.split}/{row.state}"] = row.n
        counts["turns"] += int(row.turns)

    counts["steps"] = await connection.scalar(select(func.count()).select_from(steps)) or 0
    return counts
