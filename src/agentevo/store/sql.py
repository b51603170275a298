"""The common part of the SQL stores: the rows of a transaction, and the leasing of tasks. A backend
defines how it runs a transaction, its locks and its clock. Work awaits only its connection, so a
backend with a blocking driver can run all of it in one thread.

Statements are built once for each combination of columns and conditions, because SQLAlchemy takes
longer to build a statement than SQLite takes to execute it.

Rows that will change are read `FOR UPDATE`, and rows that another worker is leasing are skipped. So
on PostgreSQL many workers can lease at the same time. SQLite ignores both clauses and has a single
writer anyway.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Float,
    Integer,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.store.calls import COLUMNS
from agentevo.store.clock import CLOCK_TOLERANCE_S, Now
from agentevo.store.codec import decode_lease
from agentevo.store.database_rows import Condition, Operator, Row
from agentevo.store.records import Lease, RetryPolicy
from agentevo.store.rows import Rows, expire_lease
from agentevo.store.store import Store
from agentevo.store.tables import BIG, metadata, tasks
from agentevo.store.transactions import Piece

_OPERATORS: dict[Operator, Callable[[Any, Any], ColumnElement[bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: column.in_(values),
    "starts": lambda column, prefix: column.startswith(prefix),
}
_SELECTIVE_COLUMNS = frozenset({"group_id", "task_id", "step", "trained_step"})
"""Columns of trajectories in which few rows of a large store share a value."""
_CHANGING = ("ended_at", "status", "error", "attributes", "seen_at")
_WRITE_CALL = text(
    f"INSERT INTO calls ({', '.join(COLUMNS)}, seen_at) "
    f"VALUES ({', '.join(f':{name}' for name in COLUMNS)}, :seen_at) "
    "ON CONFLICT (trajectory_id, id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
).bindparams(
    *(
        bindparam(name, type_=metadata.tables["calls"].c[name].type)
        for name in (*COLUMNS, "seen_at")
    )
)

_LEASABLE = select(tasks).with_for_update(skip_locked=True).limit(bindparam("limit", type_=Integer))
_DUE = _LEASABLE.where(
    tasks.c.state == "queued",
    tasks.c.not_before > 0.0,
    tasks.c.not_before <= bindparam("now", type_=Float),
).order_by(tasks.c.not_before, tasks.c.seq)
_FRESH = _LEASABLE.where(tasks.c.state == "queued", tasks.c.not_before == 0.0).order_by(tasks.c.seq)
_EXPIRED = _LEASABLE.where(
    tasks.c.state == "leased",
    tasks.c.lease_expires_at <= bindparam("now", type_=Float),
    tuple_(tasks.c.lease_expires_at, tasks.c.seq)
    > tuple_(bindparam("after", type_=Float), bindparam("after_seq", type_=BIG)),
).order_by(tasks.c.lease_expires_at, tasks.c.seq)

Shape = tuple[tuple[str, Operator, bool], ...]
"""The column and operator of each condition, and whether its value is None."""


def _shape(where: Sequence[Condition]) -> Shape:
    return tuple((column, sign, value is None) for column, sign, value in where)


def _parameters(where: Sequence[Condition]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for index, (_, sign, value) in enumerate(where):
        if sign == "outside":
            parameters[f"at_{index}"], parameters[f"to_{index}"] = value
        elif value is not None:
            parameters[f"at_{index}"] = value
    return parameters


def _clauses(table: Table, shape: Shape) -> list[ColumnElement[bool]]:
    is_narrow = table.name == "trajectories" and any(
        column in _SELECTIVE_COLUMNS and sign in ("=", "in") for column, sign, _ in shape
    )
    clauses: list[ColumnElement[bool]] = []
    for index, (name, sign, is_null) in enumerate(shape):
        column: ColumnElement[Any] = table.c[name]
        parameter = bindparam(f"at_{index}", expanding=sign == "in", type_=column.type)
        if is_null:
            clauses.append(column.is_(None) if sign == "=" else column.is_not(None))
        elif sign == "outside":
            last = bindparam(f"to_{index}", type_=column.type)
            clauses.append((column < parameter) | (column > last))
        else:
            # No index can use a column in this form. PostgreSQL analyzes a table that grew quickly
            # only later. Until then it takes a split to be as rare as a group, and walks over all
            # rows of the split to find those that match both.
            hides = is_narrow and sign == "=" and name not in _SELECTIVE_COLUMNS
            clauses.append(
                _OPERATORS[sign](func.coalesce(column, "") if hides else column, parameter)
            )

    return clauses


@cache
def _select(
    table_name: str,
    columns: tuple[str, ...],
    shape: Shape,
    order: str | None,
    *,
    descending: bool,
    is_limited: bool,
    lock: bool,
) -> Select[Any]:
    table = metadata.tables[table_name]
    query = select(*(table.c[name] for name in columns or table.c.keys()))
    query = query.where(*_clauses(table, shape))
    if order is not None:
        query = query.order_by(table.c[order].desc() if descending else table.c[order])
    if is_limited:
        query = query.limit(bindparam("limit", type_=Integer))

    return query.with_for_update() if lock else query


@cache
def _update(
    table_name: str, shape: Shape, columns: tuple[str, ...], increments: tuple[str, ...]
) -> Update:
    """The parameters are those of the conditions, and `new_NAME` for each column."""
    table = metadata.tables[table_name]
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in columns}
    values |= {name: table.c[name] + 1 for name in increments}
    return update(table).where(*_clauses(table, shape)).values(values)


def _new_values(values: Row) -> dict[str, Any]:
    return {f"new_{name}": value for name, value in values.items()}


class SQLRows(Rows):
    tokens_key = "trajectory_seq"
    trajectory_key = "seq"

    def __init__(
        self, connection: AsyncConnection, now: Callable[[AsyncConnection], Awaitable[Now]]
    ) -> None:
        self.connection = connection
        self._now = now

    async def now(self) -> Now:
        return await self._now(self.connection)

    async def _mappings(self, query: Select[Any], **parameters: Any) -> list[Row]:
        rows = await self.connection.execute(query, parameters)
        return [row._mapping for row in rows]

    async def find(
        self,
        table: str,
        columns: Sequence[str] = (),
        where: Sequence[Condition] = (),
        *,
        order: str | None = None,
        descending: bool = False,
        limit: int | None = None,
        lock: bool = False,
    ) -> Sequence[Row]:
        query = _select(
            table,
            tuple(dict.fromkeys(columns)),
            _shape(where),
            order,
            descending=descending,
            is_limited=limit is not None,
            lock=lock,
        )
        limited = {} if limit is None else {"limit": limit}
        return await self._mappings(query, **_parameters(where), **limited)

    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        if rows:
            await self.connection.execute(_insert(table), [dict(row) for row in rows])

    async def update(
        self,
        table: str,
        where: Sequence[Condition],
        values: Row,
        increments: Sequence[str] = (),
    ) -> int:
        statement = _update(table, _shape(where), tuple(values), tuple(increments))
        parameters = _parameters(where) | _new_values(values)
        return (await self.connection.execute(statement, parameters)).rowcount

    async def delete(self, table: str, where: Sequence[Condition] = ()) -> int:
        of = metadata.tables[table]
        statement = delete(of).where(*_clauses(of, _shape(where)))
        return (await self.connection.execute(statement, _parameters(where))).rowcount

    async def count(
        self, table: str, where: Sequence[Condition] = (), *, distinct: str | None = None
    ) -> int:
        of = metadata.tables[table]
        number = func.count() if distinct is None else func.count(of.c[distinct].distinct())
        query = select(number).select_from(of).where(*_clauses(of, _shape(where)))
        return int(await self.connection.scalar(query, _parameters(where)) or 0)

    async def count_by(
        self, table: str, columns: Sequence[str], total: str | None = None
    ) -> list[tuple[tuple[str, ...], int, int]]:
        of = metadata.tables[table]
        group = [of.c[name] for name in columns]
        sums = [] if total is None else [func.sum(of.c[total])]
        rows = await self.connection.execute(select(func.count(), *group, *sums).group_by(*group))
        return [
            (tuple(values[: len(group)]), number, int(values[-1]) if sums else 0)
            for number, *values in rows
        ]

    async def write_calls(self, rows: Sequence[Row]) -> None:
        await self.connection.execute(_WRITE_CALL, [dict(row) for row in rows])

    async def lease_tasks(
        self, worker: str, *, lease_s: float, limit: int, retries: RetryPolicy
    ) -> list[Lease]:
        now = await self.now()
        taken = await self._take_expired(now, limit=limit, retries=retries)
        for query, values in ((_DUE, {"now": now.steady}), (_FRESH, {})):
            if len(taken) < limit:
                rows = await self._mappings(query, limit=limit - len(taken), **values)
                taken += [(row, {}) for row in rows]

        if not taken:
            await self._restart_future_leases(now, retries)

        leases = [decode_lease(row, worker, now=now.steady, lease_s=lease_s) for row, _ in taken]
        changes = {
            "state": "leased",
            "worker": worker,
            "lease_started_at": now.steady,
            "lease_expires_at": now.steady + lease_s,
            "not_before": 0.0,
        }
        await self._update_tasks(
            [
                (
                    row,
                    changes
                    | {"num_expiries": row["num_expiries"], "history": row["history"]}
                    | expired
                    | {"fencing_id": lease.fencing_id, "num_leases": lease.attempt},
                )
                for lease, (row, expired) in zip(leases, taken, strict=True)
            ]
        )

        return leases

    async def _take_expired(
        self, now: Now, *, limit: int, retries: RetryPolicy
    ) -> list[tuple[Row, dict[str, Any]]]:
        """Up to `limit` tasks whose lease expired, as (row, changes in addition to the lease).
        Tasks with too many expired leases become poison."""
        taken: list[tuple[Row, dict[str, Any]]] = []
        after = (-math.inf, 0)
        while len(taken) < limit:
            rows = await self._mappings(
                _EXPIRED,
                now=now.steady,
                limit=limit - len(taken),
                after=after[0],
                after_seq=after[1],
            )
            if not rows:
                break

            # Continues from a position, not from an offset: if another worker unlocks a row, an
            # offset would skip rows behind it.
            after = max((row["lease_expires_at"], row["seq"]) for row in rows)
            poisoned: list[tuple[Row, dict[str, Any]]] = []
            for row in rows:
                changes = expire_lease(row, now.wall, retries)
                (taken if changes["state"] == "leased" else poisoned).append((row, changes))

            await self._update_tasks(poisoned)

        return taken

    async def _update_tasks(self, changes: list[tuple[Row, dict[str, Any]]]) -> None:
        """Updates each row with its values. All rows name the same columns."""
        if changes:
            statement = _update("tasks", (("seq", "=", False),), tuple(changes[0][1]), ())
            parameters = [{"at_0": row["seq"]} | _new_values(values) for row, values in changes]
            await self.connection.execute(statement, parameters)

    async def _restart_future_leases(self, now: Now, retries: RetryPolicy) -> None:
        """Shortens leases and delays that are too long because the clock was set back, or started
        again at a reboot: see clock.py."""
        length = tasks.c.lease_expires_at - tasks.c.lease_started_at
        late = update(tasks).where(
            tasks.c.state == "leased", tasks.c.lease_started_at > now.steady + CLOCK_TOLERANCE_S
        )
        await self.connection.execute(
            late.values(lease_started_at=now.steady, lease_expires_at=now.steady + length)
        )
        longest = now.steady + retries.max_delay_s
        waiting: list[Condition] = [("state", "=", "queued"), ("not_before", ">", longest)]
        await self.update("tasks", waiting, {"not_before": longest})


@cache
def _insert(table_name: str) -> Any:
    return insert(metadata.tables[table_name])


class SQLStore(Store):
    """`Store` describes the guarantees of the methods."""

    _errors = (DBAPIError, OSError, UnicodeDecodeError)

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        def work(rows: SQLRows) -> Awaitable[list[Lease]]:
            return rows.lease_tasks(worker, lease_s=lease_s, limit=limit, retries=self._retries)

        return await self._run("lease_tasks", work, "worker")

    async def _run_pieces(self, what: str, pieces: Mapping[str, Piece]) -> dict[str, int]:
        """Runs all pieces in one transaction."""

        async def work(rows: SQLRows) -> dict[str, int]:
            done = dict.fromkeys(pieces, 0)
            for name, piece in pieces.items():
                after = None
                while True:
                    number, after = await piece(rows, after)
                    done[name] += number
                    if after is None:
                        break
            return done

        return await self._run(what, work, "alone")
