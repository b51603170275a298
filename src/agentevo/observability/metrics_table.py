"""The columns of metrics.jsonl, read while a run writes the file.

    table = MetricsTable(path)
    while table.read_more(): ...
    if table.is_replaced: table = MetricsTable(path)

Invariants. Only complete lines are read, and each line once. If the file was replaced, as by a
resumed run, or has become shorter, nothing more is read. A line that is not a row is left out and
counted. A column has the numbers of the rows in which its metric was logged, and the values. null
is NaN. Columns only grow, so another thread may read them at the same time.
"""

from __future__ import annotations

import math
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agentevo.observability.metrics import RESERVED

CHUNK_BYTES = 8 * 2**20
"""The number of bytes of a read. A longer line is not a row."""
MAX_METRICS = 20_000
"""The maximum number of metric names."""

_DECODER: msgspec.json.Decoder[dict[str, float | None]] = msgspec.json.Decoder(
    dict[str, float | None]
)


class Measured(Protocol):
    """A run whose numbers are read up to some row."""

    @property
    def table(self) -> MetricsTable: ...

    @property
    def num_rows(self) -> int: ...


class MetricColumn:
    """The values of a metric, and the rows that they were in."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")


class MetricsTable:
    """The rows of a metrics file as columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = array("q")
        self.times = array("d")
        """The Unix time of each row, NaN if it has none."""
        self.columns: dict[str, MetricColumn] = {}
        self.num_bad_lines = 0
        self.first_bad_line: int | None = None
        self._num_lines = 0
        self._place = 0
        self._inode: tuple[int, int] | None = None
        self.is_replaced = False
        """Whether the file was replaced or deleted."""
        self._rest = b""

    @property
    def num_rows(self) -> int:
        return len(self.steps)

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    def read_more(self) -> bool:
        """Reads the new part of the file, at most CHUNK_BYTES. Returns whether there was any.
        Raises OSError if the file can't be read. A missing file has no rows."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            self.is_replaced = self._inode is not None
            return False

        try:
            what = os.fstat(handle)
            if not stat.S_ISREG(what.st_mode):
                raise OSError(f"{self.path} is not a file")

            inode = (what.st_dev, what.st_ino)
            if self._inode not in (None, inode) or what.st_size < self._place:
                self.is_replaced = True
                return False

            self._inode = inode
            os.lseek(handle, self._place, os.SEEK_SET)
            read = os.read(handle, CHUNK_BYTES)
        finally:
            os.close(handle)

        self._place += len(read)
        return self._add(read)

    def _add(self, read: bytes) -> bool:
        lines = (self._rest + read).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > CHUNK_BYTES:  # the rest of this long line is not a row either
            self._rest = b"!"

        for line in lines:
            self._num_lines += 1
            if line.strip():
                self._add_line(line)

        return bool(read)

    def _add_line(self, line: bytes) -> None:
        try:
            row = _DECODER.decode(line)
            step = row.pop("step", None)
            if step is None or step != int(step):
                raise ValueError("no step")
            self.add_row(int(step), row.pop("time", None), row)
        except (msgspec.DecodeError, ValueError, OverflowError):
            self.num_bad_lines += 1
            if self.first_bad_line is None:
                self.first_bad_line = self._num_lines

    def add_row(self, step: int, time: float | None, row: Mapping[str, float | None]) -> None:
        """Adds a row from another source. Raises OverflowError if the step is larger than any
        run's."""
        self.steps.append(step)
        self.times.append(math.nan if time is None else time)

        place = len(self.steps) - 1
        for name, value in row.items():
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MAX_METRICS or name in RESERVED:
                    continue
                column = self.columns[name] = MetricColumn()
            column.values.append(math.nan if value is None else value)
            column.rows.append(place)

    def series(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """The row numbers and values of a metric. Empty for a metric that was never logged."""
        column = self.columns.get(name)
        if column is None:
            return (), ()
        num = len(column.rows)
        return column.rows[:num], column.values[:num]

    def latest(self, name: str) -> float | None:
        """The newest value that is a number."""
        column = self.columns.get(name)
        if column is None:
            return None
        for value in reversed(column.values):
            if math.isfinite(value):
                return value
        return None

    def has(self, name: str, row: int) -> bool:
        """Whether the metric was logged in that row, as a number or not."""
        column = self.columns.get(name)
        if column is None:
            return False
        place = bisect_left(column.rows, row)
        return place < len(column.rows) and column.rows[place] == row

    def value_at(self, name: str, row: int) -> float | None:
        """The value in that row. None if it was not logged or is not a number."""
        if not self.has(name, row):
            return None
        column = self.columns[name]
        value = column.values[bisect_left(column.rows, row)]
        return value if math.isfinite(value) else None

    def row(self, number: int) -> dict[str, float]:
        """The numbers of a row."""
        values = {name: self.value_at(name, number) for name in list(self.columns)}
        return {name: value for name, value in values.items() if value is not None}
