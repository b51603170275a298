"""Search by words: SQLite's FTS5, ranked by BM25. In scripts without spaces, every letter counts as
a word (word_split.py)."""

from __future__ import annotations

import itertools
import re
import sqlite3
import threading
from collections.abc import Sequence

from agentevo.agents.tools.corpus import MAX_QUERY, Passage
from agentevo.agents.tools.word_split import separate

MAX_TERMS = 32
"""The number of words of a query, and of pairs of them, that are searched. (The rarest words would
be the best choice, but they are not known.)"""
LETTERS_OF_A_WORD = 2
"""The number of letters of a script without spaces that count as one word."""
_WORD = re.compile(r"\w+")


class WordIndex:
    """A search index by words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE passages "
            "USING fts5(text, content='', tokenize='porter unicode61')"
        )
        self._database.executemany(
            "INSERT INTO passages (rowid, text) VALUES (?, ?)",
            ((number, separate(passage.contents)) for number, passage in enumerate(passages)),
        )

    def find(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """See Index."""
        match = _match(query)
        if not match:
            return []

        with self._lock:
            rows = self._database.execute(
                "SELECT rowid, -bm25(passages) FROM passages WHERE passages MATCH ? "
                "ORDER BY bm25(passages), rowid LIMIT ?",
                (match, count),
            ).fetchall()

        return [(self._passages[number], score) for number, score in rows]


def _match(query: str) -> str:
    """FTS5's query for any of the words and any pair of neighbouring words. A passage with a whole
    name of several words then ranks before one with these words in different places."""
    query = query[:MAX_QUERY].lower()
    separated = separate(query)
    words = _WORD.findall(separated)
    most = MAX_TERMS if separated == query else MAX_TERMS * LETTERS_OF_A_WORD
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(words)]
    terms = [list(dict.fromkeys(some))[:most] for some in (words, pairs)]
    return " OR ".join(f'"{term}"' for some in terms for term in some)
