"""All rows of an index as columns in memory, for filters, histograms and sorts. Any combination
over a million rows takes milliseconds.

A row's place in the columns is its number in the store. Words are numbers there too, in the order
in which they first appeared.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

WORDS = (
    "split",
    "state",
    "status",
    "agent",
    "kind",
    "difficulty",
    "decoding",
    "error_kind",
    "drop_reason",
    "task_id",
)
TYPES: dict[str, Any] = {
    **dict.fromkeys(WORDS, np.int32),
    "alive": np.bool_,
    "success": np.bool_,
    "step": np.int32,
    "trained_step": np.int32,
    "lowest_version": np.int32,
    "num_completion_tokens": np.int32,
    "reward": np.float64,
    "duration_s": np.float32,
    "judge_gap": np.float32,
    "lowest_logprob": np.float32,
    "advantage": np.float32,
    "moved": np.float32,
}
NONE = -1
"""A missing number in a column of whole numbers, and a missing word."""
ROWS = 20_000
_SELECT = (
    f"SELECT {', '.join(TYPES)}, seq, change FROM attempts "
    "WHERE (change, seq) > (?, ?) ORDER BY change, seq LIMIT ?"
)
Columns = dict[str, np.ndarray]
"""Maps a name in TYPES to the column."""


class IndexColumns:
    """The columns of an index. Threads may share them. Columns that `refresh` returned may change
    under a reader, but only to newer values of the same rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index_id = ""
        self._reset()

    def _reset(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        self._size = 0
        self._columns: Columns = {name: np.zeros(0, dtype=kind) for name, kind in TYPES.items()}
        self._last = (0, 0)

    def refresh(self, connection: sqlite3.Connection) -> tuple[Columns, dict[str, dict[str, int]]]:
        """The columns with all present rows of the index, and the number of each word of a column.
        Raises sqlite3.Error."""
        index_id = connection.execute("SELECT value FROM facts WHERE name = 'made'").fetchone()[0]
        cursor = connection.cursor()
        cursor.row_factory = None
        with self._lock:
            if index_id != self._index_id:
                self._reset()
                self._index_id = index_id

            while rows := cursor.execute(_SELECT, (*self._last, ROWS)).fetchall():
                self._take(rows)

            columns = {name: column[: self._size] for name, column in self._columns.items()}
            return columns, self._numbers

    def _take(self, rows: list[tuple[Any, ...]]) -> None:
        *values, seqs, changes = zip(*rows, strict=True)
        places = np.array(seqs, dtype=np.int64)
        self._size = max(self._size, int(places.max()) + 1)
        if self._size > len(self._columns["alive"]):
            room = max(self._size, 2 * len(self._columns["alive"]))
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate(
                    [column, np.zeros(room - len(column), dtype=column.dtype)]
                )

        for (name, kind), stored in zip(TYPES.items(), values, strict=True):
            cells: Sequence[Any] = stored
            if name in WORDS:
                numbers = self._numbers[name]
                cells = [
                    NONE if word is None else numbers.setdefault(word, len(numbers))
                    for word in stored
                ]
            elif np.issubdtype(kind, np.integer):
                cells = [NONE if cell is None else cell for cell in stored]

            self._columns[name][places] = np.array(cells, dtype=np.float64).astype(kind)

        self._last = (changes[-1], seqs[-1])
