"""What a database does with rows in a transaction: it finds, inserts, changes and deletes them.
Rows have the columns of tables.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal, TypeVar

from agentevo.store.clock import Now

T = TypeVar("T")

Row = Mapping[str, Any]
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "outside", "starts"]
Condition = tuple[str, Operator, Any]
"""A column, an operator and a value. `outside` (first, last) is below or above both, `starts` means
a prefix. Only `=` and `!=` compare with None."""

CHUNK = 500
"""The number of ids in an IN list, below every database's limit on bound parameters."""


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def within(seqs: range | None) -> list[Condition]:
    return [] if seqs is None else [("seq", ">=", seqs.start), ("seq", "<", seqs.stop)]


class DatabaseRows(ABC):
    """The rows of a store in a transaction, as a database gives them."""

    tokens_key: ClassVar[str]
    """The column of `tokens` that names the trajectory."""
    trajectory_key: ClassVar[str]
    """The column of `trajectories` with that name."""

    @abstractmethod
    async def now(self) -> Now: ...

    @abstractmethod
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
        """The rows that satisfy all conditions, with at least these columns (all by default). With
        `lock`, no other transaction can change them until this one ends."""

    @abstractmethod
    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        """Inserts new rows. The database assigns `seq`."""

    @abstractmethod
    async def update(
        self,
        table: str,
        where: Sequence[Condition],
        values: Row,
        increments: Sequence[str] = (),
    ) -> int:
        """Sets the values, and adds 1 to the columns in `increments`. Returns the number of
        rows."""

    @abstractmethod
    async def delete(self, table: str, where: Sequence[Condition] = ()) -> int:
        """Deletes rows and returns their number."""

    @abstractmethod
    async def count(
        self, table: str, where: Sequence[Condition] = (), *, distinct: str | None = None
    ) -> int:
        """The number of rows, or of the distinct values of a column."""

    @abstractmethod
    async def count_by(
        self, table: str, columns: Sequence[str], total: str | None = None
    ) -> list[tuple[tuple[str, ...], int, int]]:
        """(values of the columns, number of rows, sum of the column `total` or 0) for each
        combination of values."""

    @abstractmethod
    async def write_calls(self, rows: Sequence[Row]) -> None:
        """Writes calls. If a call exists, its row gets the new end, status and attributes."""

    async def by_key(
        self, table: str, key: str, values: Iterable[Any], *columns: str
    ) -> dict[Any, Row]:
        """Maps a value of the column `key` to its row. Unknown values are absent."""
        rows: dict[Any, Row] = {}
        for chunk in chunks(dict.fromkeys(values)):
            matching = await self.find(table, (key, *columns), [(key, "in", chunk)])
            rows.update((row[key], row) for row in matching)
        return rows

    async def newest_seq(self, table: str) -> int:
        rows = await self.find(table, ["seq"], order="seq", descending=True, limit=1)
        return int(rows[0]["seq"]) if rows else 0

    async def delete_tokens(self, keys: list[Any]) -> int:
        """Deletes the tokens of these trajectories, by `tokens_key`."""
        return await self.delete("tokens", [(self.tokens_key, "in", keys)]) if keys else 0
