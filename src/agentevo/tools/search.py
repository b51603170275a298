"""Search in a corpus, as a tool: full text in a file of passages (SQLite's FTS5, ranked by BM25),
or a retriever behind HTTP.

    {"id": "12", "title": "Perth", "text": "Perth is a city in ..."}     a line of the corpus

The retriever's API is Search-R1's: POST {"queries": [...], "topk": 3, "return_scores": true} gives
{"result": [[{"document": {"contents": "TITLE\\nTEXT"}, "score": 1.5}, ...], ...]}. The index of a
corpus is made once in a process, in memory.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx

from agentevo.config.tools import tool
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError
from agentevo.parsing import ParseError, parse_json

MAX_QUERY = 1000
"""Characters of a query that are read."""
MAX_TERMS = 32
"""Words of a query that are looked for: the rarest say most, but which those are is not known."""
TIMEOUT_S = 30.0
_WORD = re.compile(r"\w+")
_TEXT_KEYS = ("text", "contents", "content", "passage")


@tool("search")
class Search:
    """Finds passages of a corpus: the option `corpus` is a file of them, or `url` a retriever."""

    def __init__(self, corpus: str | None = None, url: str | None = None, top_k: int = 3) -> None:
        """Raises ConfigError."""
        if (corpus is None) == (url is None):
            raise ConfigError("the tool search needs the option `corpus`, a file, or `url`: one")
        self._url, self._top_k = url, top_k
        self._index = None if corpus is None else corpus_index(str(Path(corpus).expanduser()))

    def search(self, query: str) -> str:
        """Finds passages that answer a question.

        Args:
            query: What is looked for, in a few words.
        """
        found = self._asked(query) if self._index is None else self._index.find(query, self._top_k)
        lines = [f"[{number}] {one}" for number, one in enumerate(found, start=1)]
        return "\n".join(lines) or "Nothing was found."

    def _asked(self, query: str) -> list[str]:
        asked = {"queries": [query], "topk": self._top_k, "return_scores": True}
        try:
            answer = httpx.post(str(self._url), json=asked, timeout=TIMEOUT_S)
            answer.raise_for_status()
            (found,) = answer.json()["result"]
            return [passage_of(one.get("document", one)) for one in found]
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError)
            raise ToolUnavailableError(
                f"the retriever {self._url}: {error}", was_sent=sent
            ) from error
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolError(f"the retriever answers nonsense: {error}") from error


class CorpusIndex:
    """Passages by their words. Used by any thread."""

    def __init__(self, passages: list[str]) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE passages USING fts5(text, tokenize='porter unicode61')"
        )
        self._database.executemany("INSERT INTO passages VALUES (?)", ((one,) for one in passages))

    def find(self, query: str, count: int) -> list[str]:
        """The passages that match best, the best first; equal ones in the corpus's order."""
        words = list(dict.fromkeys(_WORD.findall(query[:MAX_QUERY].lower())))[:MAX_TERMS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._database.execute(
                "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid "
                "LIMIT ?",
                (match, count),
            )
            return [text for (text,) in rows]


@lru_cache(maxsize=8)
def corpus_index(path: str) -> CorpusIndex:
    """The index of a corpus file. Raises ConfigError for one that can't be read."""
    passages = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    passages.append(_read_passage(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"the corpus {path} can't be read: {error}") from error
    if not passages:
        raise ConfigError(f"the corpus {path} has no passages")
    return CorpusIndex(passages)


def _read_passage(line: str, where: str) -> str:
    try:
        return passage_of(parse_json(line))
    except (ParseError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def passage_of(row: Any) -> str:
    """A row of a corpus as one text, the title first. Raises ValueError."""
    if isinstance(row, dict):
        text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
        title = row.get("title")
        if text is not None:
            return f"{title}\n{text}" if isinstance(title, str) and title else text
    raise ValueError(f'no passage: {json.dumps(row)[:100]}; write {{"title": ..., "text": ...}}')
