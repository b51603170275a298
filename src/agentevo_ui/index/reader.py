"""Reads the index for pages, and never a store. Any number of threads and processes may use it."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from agentevo.errors import AgentEvoError
from agentevo.store.records import TrajectorySummary
from agentevo_ui.index.columns import NONE, Columns, IndexColumns
from agentevo_ui.index.database import connect
from agentevo_ui.index.selection import ORDERS, RANGES, WORDS, Selection, cursor

PAGE = 50
MAX_FOUND = 200_000
"""The maximum number of attempts that a search for a text returns: the newest ones."""
MAX_BARS = 24
MAX_GROUP = 500
_SNIPPET = "snippet(search, 0, char(2), char(2), '…', 24)"
"""A part of the text around the first match. The character 2 separates text and matched words."""


class IndexUnavailableError(AgentEvoError):
    """The index does not exist yet, or is being rebuilt."""


class IndexState(NamedTuple):
    """The progress of an index."""

    phase: str = "listing"
    """`listing`, `comparing`, `reading` (texts and log-probs), or empty if it is up to date."""
    done: int = 0
    of: int = 0
    at: float = 0.0
    """The Unix time when the whole store was last listed. 0 before that."""


class IndexRow(TrajectorySummary, frozen=True, kw_only=True):
    """An attempt in a list: its summary and derived values."""

    seq: int
    judge_gap: float | None
    is_read: bool
    lowest_logprob: float | None
    lowest_version: int | None
    advantage: float | None
    moved: float | None
    """The largest log-prob change of a token by the update."""
    kind: str | None
    snippet: tuple[str, ...] = ()
    """For a search: text, matched words and text in turn."""

    @property
    def age(self) -> int | None:
        """The age of its oldest token, in versions, at the step that trained it."""
        if self.trained_step is None or self.lowest_version is None:
            return None
        return self.trained_step - 1 - self.lowest_version


class Listing(NamedTuple):
    """A page of a list."""

    rows: list[IndexRow]
    total: int
    """The number of rows of the whole list. Rows without a value of the order are not counted."""
    next: str | None
    """`after` of the next page."""
    is_cut: bool
    """Whether more than MAX_FOUND attempts contain the text. The list then has the newest ones."""


class IndexBar(NamedTuple):
    """A bar of a histogram."""

    low: float
    high: float
    size: int
    good: int
    """The number of successes in the bar."""


class IndexReader:
    """Reads an index. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = IndexColumns()

    @contextmanager
    def open(self) -> Iterator[OpenIndex]:
        """The index as it is now, for the thread that opens it. Raises IndexUnavailableError, also
        for its methods."""
        with self._connected() as connection:
            yield OpenIndex(connection, self._columns)

    def state(self) -> IndexState:
        """The progress of the index. Raises IndexUnavailableError."""
        with self._connected() as connection:
            facts = dict(map(tuple, connection.execute("SELECT * FROM facts").fetchall()))
            return IndexState(
                phase=str(facts.get("phase") or ("" if "listed_at" in facts else "listing")),
                done=int(facts.get("done") or 0),
                of=int(facts.get("of") or 0),
                at=float(facts.get("listed_at") or 0.0),
            )

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(connect(self._path)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise IndexUnavailableError(
                f"the index is not there yet, or is being rebuilt ({error})"
            ) from error


class OpenIndex:
    """An index at a moment. Its columns are read-only. A page uses the same selection many times,
    so it is computed once."""

    def __init__(self, connection: sqlite3.Connection, source: IndexColumns) -> None:
        self._db = connection
        self._source = source
        self._numbers: dict[str, dict[str, int]] = {}
        """Maps a column of words to the number of each word."""
        self._selected: dict[bytes, tuple[np.ndarray, bool]] = {}
        self._searches: dict[str, tuple[np.ndarray, bool]] = {}

    @cached_property
    def columns(self) -> Columns:
        """The columns (columns.py), `age` in versions, and `surprise`: |advantage|."""
        columns, self._numbers = self._source.refresh(self._db)
        ages = columns["trained_step"] - 1 - columns["lowest_version"]
        is_known = (columns["trained_step"] != NONE) & (columns["lowest_version"] != NONE)
        columns["age"] = np.where(is_known, ages, NONE)
        columns["surprise"] = np.abs(columns["advantage"])
        return columns

    def has_word(self, name: str, word: str) -> np.ndarray:
        """[N] bool: the rows with this word in the column `name`, such as `split`."""
        column = self.columns[name]
        return np.equal(column, self._numbers[name].get(word, NONE - 1))

    def words(self, name: str) -> list[str]:
        """The words that the numbers in a column mean."""
        assert self.columns
        return list(self._numbers[name])

    def listing(self, selection: Selection, *, size: int = PAGE) -> Listing:
        """A page of the selected attempts."""
        where, is_cut = self._where(selection)
        column, descending, _ = ORDERS[selection.order]
        where = where & self._has_value(column)
        total = int(np.count_nonzero(where))
        values = (
            np.arange(len(where), dtype=np.float64)
            if column == "seq"
            else self.columns[column].astype(np.float64, copy=False)
        )
        keys = -values if descending else values
        if selection.after is not None:
            value = -selection.after[0] if descending else selection.after[0]
            seqs = np.arange(len(where))
            where = where & ((keys > value) | ((keys == value) & (seqs < selection.after[1])))

        matches = np.flatnonzero(where)[::-1]  # among equal rows, the newest first
        if len(matches) > size + 1:  # avoids sorting a million rows for the first fifty
            match_keys = keys[matches]
            bound = np.partition(match_keys, size)[size]
            before = matches[match_keys < bound]
            equal = matches[match_keys == bound][: size + 1 - len(before)]
            matches = np.concatenate([before, equal])

        matches = matches[np.lexsort((-matches, keys[matches]))]
        page = matches[:size]
        last = cursor(float(values[page[-1]]), int(page[-1])) if len(matches) > size else None
        return Listing(self.rows(page.tolist(), selection.text), total, last, is_cut)

    def histogram(self, selection: Selection, name: str) -> list[IndexBar]:
        """The bars of `reward`, `tokens` or `age` of the selected attempts. The range of that
        column itself is ignored."""
        ranges = {key: value for key, value in selection.ranges.items() if key != name}
        where, _ = self._where(msgspec.structs.replace(selection, ranges=ranges))
        where = where & self._has_value(RANGES[name])
        values = self.columns[RANGES[name]][where]
        return bars(values, self.columns["success"][where], is_whole=name != "reward")

    def _has_value(self, name: str) -> np.ndarray:
        """[N] bool, or [1] if all are equal: the rows with a value to sort by."""
        if name == "age":
            return np.not_equal(self.columns[name], NONE)
        if name != "seq" and self.columns[name].dtype.kind == "f":
            return ~np.isnan(self.columns[name])
        return np.ones(1, np.bool_)

    def group(self, group_id: str) -> list[IndexRow]:
        """The attempts of a group in the order of their numbers."""
        query = (
            "SELECT seq FROM attempts WHERE group_id = ? AND alive ORDER BY attempt, seq LIMIT ?"
        )
        return self.rows([row[0] for row in self._db.execute(query, (group_id, MAX_GROUP))])

    def step_groups(
        self, selection: Selection, *, after: str | None = None, limit: int = 24
    ) -> tuple[list[list[IndexRow]], str | None, int]:
        """Whole groups that contain a selected attempt, the id after which the next page begins,
        and the number of groups. They are in the order of their ids. If attempts are ordered by
        reward, they are in the order of the mean reward of their completed attempts."""
        rewards: dict[str, list[float]] = {}
        seqs = np.flatnonzero(self._where(selection)[0]).tolist()
        for row in self._by_seq("group_id, reward, status", seqs):
            group = rewards.setdefault(row["group_id"], [])
            group += [row["reward"]] if row["status"] == "completed" else []

        sign = {"worst": 1.0, "best": -1.0}.get(selection.order, 0.0)
        keys = {
            name: (sign * sum(group) / max(len(group), 1), _natural(name))
            for name, group in rewards.items()
        }
        ordered = sorted(rewards, key=keys.__getitem__)
        last = None if after is None else keys.get(after, (0.0, _natural(after)))
        start = 0 if last is None else sum(keys[name] <= last for name in ordered)
        page = ordered[start : start + limit]
        next_after = page[-1] if start + limit < len(ordered) else None
        return [self.group(name) for name in page], next_after, len(ordered)

    def find(self, attempt_id: str) -> IndexRow | None:
        """An attempt by its id."""
        query = "SELECT seq FROM attempts WHERE id = ? AND alive"
        rows = self.rows([row[0] for row in self._db.execute(query, (attempt_id,))])
        return rows[0] if rows else None

    def count_words(self, selection: Selection, name: str) -> list[tuple[str, int]]:
        """The words of a filter, with the number of selected attempts that have each. The filter's
        own choice is ignored."""
        choices = {key: value for key, value in selection.choices.items() if key != name}
        where, _ = self._where(msgspec.structs.replace(selection, choices=choices))
        if name == "outcome":
            good = int(np.count_nonzero(self.columns["success"] & where))
            counts = {"success": good, "no success": int(np.count_nonzero(where)) - good}
        else:
            numbers = self.columns[WORDS[name]][where]
            frequencies = np.bincount(numbers[numbers != NONE])
            counts = dict(zip(self.words(WORDS[name]), frequencies.tolist(), strict=False))

        present = [(word, number) for word, number in counts.items() if word and number]
        return sorted(present, key=lambda pair: -pair[1])[:50]

    def count(self, selection: Selection) -> tuple[int, int, float | None, float | None]:
        """The number of selected attempts, successes, the mean reward and its standard
        deviation."""
        where, _ = self._where(selection)
        rewards = self.columns["reward"][where]
        if not len(rewards):
            return 0, 0, None, None
        good = int(np.count_nonzero(self.columns["success"] & where))
        return len(rewards), good, float(rewards.mean()), float(rewards.std())

    def has_values(self, selection: Selection) -> dict[str, bool]:
        """Maps an order to whether any selected attempt has a value for it."""
        where, _ = self._where(selection)
        return {
            order: bool((where & self._has_value(column)).any())
            for order, (column, _, _) in ORDERS.items()
        }

    def ids(self, seqs: Sequence[int]) -> dict[int, str]:
        """Maps a number to the attempt's id."""
        return {row["seq"]: row["id"] for row in self._by_seq("seq, id", seqs)}

    def rows(self, seqs: Sequence[int], text: str = "") -> list[IndexRow]:
        """Rows in this order, with a snippet around the searched text."""
        snippets: dict[int, str] = {}
        if text:
            table = "search WHERE search MATCH ? AND rowid"
            matches = self._by_seq(f"rowid, {_SNIPPET}", seqs, table, match_of(text))
            snippets = dict(map(tuple, matches))

        rows = {row["seq"]: row for row in self._by_seq("*", seqs)}
        return [_row(rows[seq], snippets.get(seq, "")) for seq in seqs if seq in rows]

    def _by_seq(
        self,
        names: str,
        seqs: Sequence[int],
        table: str = "attempts WHERE alive AND seq",
        *values: str,
    ) -> Iterator[sqlite3.Row]:
        """The rows with these numbers, without attempts that were removed in the meantime."""
        for start in range(0, len(seqs), 5_000):
            chunk = seqs[start : start + 5_000]
            marks = ", ".join("?" * len(chunk))
            yield from self._db.execute(
                f"SELECT {names} FROM {table} IN ({marks})", (*values, *chunk)
            )

    def _where(self, selection: Selection) -> tuple[np.ndarray, bool]:
        """[N] bool: the selected rows, read-only. Also whether a search was cut."""
        key = msgspec.json.encode(msgspec.structs.replace(selection, order="newest", after=None))
        if key not in self._selected:
            self._selected[key] = self._select(selection)
        return self._selected[key]

    def _select(self, selection: Selection) -> tuple[np.ndarray, bool]:
        columns = self.columns
        where = columns["alive"].copy()
        if selection.step is not None:
            trained = columns["trained_step"] == selection.step
            waiting = (columns["trained_step"] == NONE) & (columns["step"] == selection.step)
            where &= trained | waiting
            if "split" not in selection.choices:
                where &= self.has_word("split", "train")

        if selection.task:
            where &= self.has_word("task_id", selection.task)

        for name, value in selection.choices.items():
            where &= (
                columns["success"] == (value == "success")
                if name == "outcome"
                else self.has_word(WORDS[name], value)
            )

        for name, (low, high) in selection.ranges.items():
            values = columns[RANGES[name]]
            where &= (values >= low) & (values <= high) & self._has_value(RANGES[name])

        if not selection.text:
            return where, False

        if selection.text not in self._searches:
            self._searches[selection.text] = self._search(selection.text)
        has_text, is_cut = self._searches[selection.text]
        return where & has_text, is_cut

    def _search(self, text: str) -> tuple[np.ndarray, bool]:
        """[N] bool: the newest attempts with the text. Also whether there are more."""
        has_text = np.zeros(len(self.columns["alive"]), dtype=bool)
        query = match_of(text)
        if not query:
            return has_text, False

        # All numbers come in one text, because a Python row for each of 200,000 takes four times
        # as long.
        ((numbers,),) = self._db.execute(
            "SELECT group_concat(rowid) FROM (SELECT rowid FROM search WHERE search MATCH ? "
            "ORDER BY rowid DESC LIMIT ?)",
            (query, MAX_FOUND + 1),
        ).fetchall()
        seqs = np.fromstring(numbers or "", dtype=np.int64, sep=",")
        has_text[seqs[:MAX_FOUND][seqs[:MAX_FOUND] < len(has_text)]] = True
        return has_text, len(seqs) > MAX_FOUND

    def task_states(self) -> tuple[dict[str, int], float]:
        """Maps a state of the ledger to its number of tasks. Also the Unix time when they were
        counted."""
        query = "SELECT name, value FROM facts WHERE name LIKE 'task_states%'"
        facts = dict(map(tuple, self._db.execute(query).fetchall()))
        return json.loads(facts.get("task_states", "{}")), float(facts.get("task_states_at", 0.0))


def _row(row: sqlite3.Row, snippet: str) -> IndexRow:
    fields = {name: row[name] for name in IndexRow.__struct_fields__ if name != "snippet"}
    fields |= {name: bool(row[name]) for name in ("success", "truncated", "is_read")}
    pieces = tuple(snippet.split("\x02")) if snippet else ()
    return IndexRow(**fields | {"metrics": json.loads(row["metrics"]), "snippet": pieces})


def bars(values: np.ndarray, good: np.ndarray, *, is_whole: bool) -> list[IndexBar]:
    """At most MAX_BARS bars of equal width of values [N], with the number of successes [N] in each.
    Empty without values. A value at an edge belongs to the bar that begins there. At the last edge,
    it belongs to the last bar."""
    if not len(values):
        return []

    low, high, num = _evenly(float(values.min()), float(values.max()), is_whole=is_whole)
    sizes, edges = np.histogram(values, num, (low, high))
    successes, _ = np.histogram(values[good], num, (low, high))
    return [
        IndexBar(float(edges[i]), float(edges[i + 1]), int(sizes[i]), int(successes[i]))
        for i in range(num)
    ]


def _evenly(low: float, high: float, *, is_whole: bool) -> tuple[float, float, int]:
    """The first and the last edge, and the number of bars. Edges are halfway between whole numbers,
    so that all bars cover the same number of them."""
    if is_whole:
        width = max(1, -(-int(high - low + 1) // MAX_BARS))
        num = -(-int(high - low + 1) // width)
        return low - 0.5, low - 0.5 + num * width, num

    if high <= low:
        half = max(0.5, abs(low) * 1e-6)
        return low - half, high + half, 1

    # Between adjacent floats, there is no room for edges.
    is_wide = (np.diff(np.linspace(low, high, MAX_BARS + 1)) > 0).all()
    return low, high, MAX_BARS if is_wide else 1


def match_of(text: str) -> str:
    """A typed text as FTS5's query. All words must occur, "a phrase" literally, and word* matches
    the beginning of a word. -word must not occur. Every word is quoted, so that no typed character
    is syntax."""
    required: list[str] = []
    excluded: list[str] = []
    for minus, phrase, word in re.findall(r'(-?)(?:"([^"]*)"|([^\s"]+))', text):
        term_text = (phrase or word).strip("*")
        if not re.search(r"\w", term_text):
            continue
        term = '"' + term_text.replace('"', "") + '"' + ("*" if word.endswith("*") else "")
        (excluded if minus else required).append(term)

    if not required:
        return ""

    return " AND ".join(required) + "".join(f" NOT {term}" for term in excluded)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key that orders numbers in names by their size."""
    return [
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
        for piece in re.split(r"(\d{1,18})", name)
        if piece
    ]
