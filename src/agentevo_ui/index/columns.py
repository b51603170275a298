"""All rows of an index as columns in memory, for filters, histograms and sorts. Any combination
over a million rows takes milliseconds.

A row's place in the columns is its place in the index minus one. A row takes about BYTES bytes.
`refresh` reads the changes.
"""

from __future__ import annotations

import sqlite3
import threading
from typing import Any, get_args

import numpy as np

from agentevo.store.records import SPLITS, TRAJECTORY_STATES
from agentevo.types import Status

STATUSES: tuple[str, ...] = get_args(Status)
WORDS = {"split": SPLITS, "state": TRAJECTORY_STATES, "status": STATUSES}
"""Columns whose number is an index into these words."""
TYPES: dict[str, Any] = {
    "seq": np.int64,
    "step": np.int32,
    "trained_step": np.int32,
    "split": np.int8,
    "state": np.int8,
    "status": np.int8,
    "success": np.bool_,
    "truncated": np.bool_,
    "reward": np.float64,
    "num_turns": np.int32,
    "num_completion_tokens": np.int32,
    "duration_s": np.float32,
    "agent": np.int16,
    "kind": np.int16,
    "difficulty": np.int16,
    "decoding": np.int16,
    "task": np.int32,
    "error_kind": np.int16,
    "reason": np.int16,
    "judge_gap": np.float32,
    "lowest_logprob": np.float32,
    "advantage": np.float32,
    "moved": np.float32,
    "lowest_version": np.int32,
    "alive": np.bool_,
}
BYTES = sum(np.dtype(kind).itemsize for kind in TYPES.values())
NONE = -1
"""A missing number in the columns of whole numbers."""
ROWS = 20_000


def _expression(name: str) -> str:
    if name in WORDS:
        cases = " ".join(f"WHEN '{word}' THEN {i}" for i, word in enumerate(WORDS[name]))
        return f"CASE {name} {cases} ELSE {NONE} END"
    if np.issubdtype(TYPES[name], np.integer):
        return f"ifnull({name}, {NONE})"
    return name


_SELECT = (
    f"SELECT place, {', '.join(map(_expression, TYPES))}, change FROM attempts "
    "WHERE (change, place) > (?, ?) ORDER BY change, place LIMIT ?"
)


class IndexColumns:
    """The columns of an index. Threads may share them. Columns that `table` returned may change
    under a reader, but only to newer values of the same rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index_id = ""
        self._reset()

    def _reset(self) -> None:
        self._size = 0
        self._columns = {name: np.zeros(0, dtype=kind) for name, kind in TYPES.items()}
        self._change = self._place = 0

    def table(self, connection: sqlite3.Connection) -> dict[str, np.ndarray]:
        """Maps a name to its column, with all present rows of the index. Raises sqlite3.Error."""
        index_id = connection.execute("SELECT value FROM facts WHERE name = 'made'").fetchone()[0]
        with self._lock:
            if index_id != self._index_id:
                self._reset()
                self._index_id = index_id

            cursor = connection.cursor()
            cursor.row_factory = None
            while True:
                rows = cursor.execute(_SELECT, (self._change, self._place, ROWS)).fetchall()
                if rows:
                    self._take(rows)
                if len(rows) < ROWS:
                    return {name: column[: self._size] for name, column in self._columns.items()}

    def _take(self, rows: list[tuple[Any, ...]]) -> None:
        values = np.array(rows, dtype=np.float64)
        places = values[:, 0].astype(np.int64) - 1
        size = int(places.max()) + 1
        if size > len(self._columns["seq"]):
            room = max(size, 2 * len(self._columns["seq"]))
            for name, column in self._columns.items():
                wider = np.zeros(room, dtype=column.dtype)
                wider[: self._size] = column[: self._size]
                self._columns[name] = wider

        for number, (name, kind) in enumerate(TYPES.items(), start=1):
            self._columns[name][places] = values[:, number].astype(kind)

        self._size = max(self._size, size)
        self._change = int(rows[-1][-1])
        self._place = int(rows[-1][0])
