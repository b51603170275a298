"""Passages by their words: SQLite's FTS5, ranked by BM25."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Sequence

from agentevo.tools.corpus import MAX_QUERY, Passage

MAX_TERMS = 32
"""Words of a query that are looked for: the rarest say most, but which those are is not known."""
_WORD = re.compile(r"\w+")


class WordIndex:
    """Passages by their words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages, self._lock = passages, threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE passages "
            "USING fts5(text, content='', tokenize='porter unicode61')"
        )
        self._database.executemany(
            "INSERT INTO passages (rowid, text) VALUES (?, ?)",
            ((number, one.contents) for number, one in enumerate(passages)),
        )

    def find(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """See Index."""
        words = list(dict.fromkeys(_WORD.findall(query[:MAX_QUERY].lower())))[:MAX_TERMS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._database.execute(
                "SELECT rowid, -bm25(passages) FROM passages WHERE passages MATCH ? "
                "ORDER BY bm25(passages), rowid LIMIT ?",
                (match, count),
            ).fetchall()
        return [(self._passages[number], score) for number, score in rows]
