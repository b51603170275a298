"""A corpus of passages. Its indexes are in word_index.py and dense.py.

{"id": "12", "title": "Perth", "text": "Perth is a city in ..."}     a line of the file
{"id": "12", "contents": "Perth\\nPerth is a city in ..."}            Search-R1's way
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentevo.errors import ConfigError
from agentevo.runtime.parsing import ParseError, check_file, parse_json

MAX_QUERY = 1000
"""The number of characters of a query that are used."""
_TEXT_KEYS = ("text", "contents", "content", "passage")


@dataclass(frozen=True, slots=True)
class Passage:
    """One row of a corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The whole passage, beginning with the title."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Index(Protocol):
    """A search index of a corpus. Any thread can use it."""

    def find(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """The best passages with their scores, the best first; equal scores in the corpus's
        order."""
        ...


def read_corpus(path: str) -> list[Passage]:
    """The passages of a file. Raises ConfigError with the line of a malformed passage."""
    passages: list[Passage] = []
    try:
        check_file(Path(path))
    except ConfigError as error:
        raise ConfigError(f"the corpus {error}") from error

    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    passages.append(_read_passage(line, len(passages), f"{path}:{number}"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"the corpus {path} can't be read: {error}") from error

    if not passages:
        raise ConfigError(f"the corpus {path} has no passages")

    return passages


def _read_passage(line: str, number: int, where: str) -> Passage:
    try:
        return passage_of(parse_json(line), number)
    except (ParseError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def passage_of(row: Any, number: int = 0) -> Passage:
    """The passage in a row of a corpus or a document of a retriever. `number` is the id if the
    passage has none. Raises ValueError."""
    if isinstance(row, dict):
        key = next((key for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
        title = row.get("title")
        if key is not None:
            text = row[key]
            if not isinstance(title, str):
                head, newline, rest = text.partition("\n")
                title, text = (head, rest) if newline and key == "contents" else ("", text)
            return Passage(str(row.get("id", number)), title, text)

    raise ValueError(f'not a passage: {json.dumps(row)[:100]}; write {{"title": ..., "text": ...}}')
