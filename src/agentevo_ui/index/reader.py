"""Reads the index for pages, and never a store. Any number of threads and processes may use it."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from agentevo.errors import AgentEvoError
from agentevo.store.records import SPLITS
from agentevo_ui.index.bars import IndexBar, bars
from agentevo_ui.index.columns import NONE, IndexColumns
from agentevo_ui.index.columns import WORDS as COLUMN_WORDS
from agentevo_ui.index.database import connect
from agentevo_ui.index.derived import unpack_text
from agentevo_ui.index.selection import CHOICES, ORDERS, RANGES, WORDS, Selection, cursor

PAGE = 50
MAX_FOUND = 200_000
"""The maximum number of attempts that a search for a text returns: the newest ones."""
SNIPPET = 160


class IndexUnavailableError(AgentEvoError):
    """The index does not exist yet, or is being rebuilt."""


class IndexState(NamedTuple):
    """The progress of an index."""

    phase: str
    """`listing`, `comparing`, `reading` (texts and log-probs), or empty if it is up to date."""
    done: int
    of: int
    at: float
    """The Unix time when the whole store was last listed. 0 before that."""
    no_advantages: str
    """Why there are no advantages. Empty if they are computed."""


class IndexRow(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt in a list: the summary's columns and derived values."""

    place: int
    id: str
    seq: int
    task_id: str
    group_id: str
    attempt: int
    split: str
    step: int
    status: str
    state: str
    trained_step: int | None
    drop_reason: str | None
    reward: float
    success: bool
    error: str | None
    truncated: bool
    metrics: dict[str, float]
    num_turns: int
    num_completion_tokens: int
    started_at: float
    duration_s: float
    written_at: float
    judge_gap: float | None
    is_read: bool
    lowest_logprob: float | None
    mean_logprob: float | None
    lowest_version: int | None
    advantage: float | None
    moved: float | None
    """The largest log-prob change of a token by the update."""
    kind: str = ""
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


class IndexReader:
    """Reads an index. Every method raises IndexUnavailableError while there is no index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = IndexColumns()
        self._local = threading.local()

    def state(self) -> IndexState:
        """The progress of the index."""
        facts = dict(self._all("SELECT name, value FROM facts"))
        return IndexState(
            phase=str(facts.get("phase") or ("" if "listed_at" in facts else "listing")),
            done=int(facts.get("done") or 0),
            of=int(facts.get("of") or 0),
            at=float(facts.get("listed_at") or 0.0),
            no_advantages=str(facts.get("no_advantages") or ""),
        )

    def listing(self, selection: Selection, *, size: int = PAGE) -> Listing:
        """A page of the selected attempts."""
        table = self._table()
        where, is_cut = self._where(table, selection)
        column, descending, _ = ORDERS[selection.order]
        values = table[column].astype(np.float64, copy=False)
        if column == "age":
            where = where & (values != NONE)
        elif table[column].dtype.kind == "f":
            where = where & ~np.isnan(values)

        total = int(np.count_nonzero(where))
        seqs = table["seq"]
        sign = -1.0 if descending else 1.0
        keys = sign * values
        if selection.after is not None:
            value = sign * selection.after[0]
            seq = selection.after[1]
            where = where & ((keys > value) | ((keys == value) & (seqs < seq)))

        matches = np.flatnonzero(where)
        if len(matches) > size:  # avoids sorting a million rows for the first fifty
            match_keys = keys if len(matches) == len(keys) else keys[matches]
            bound = np.partition(match_keys, size)[size]
            before = matches[match_keys < bound]

            equal = matches[match_keys == bound]
            num_missing = size + 1 - len(before)  # among many equal rows, the newest
            if len(equal) > num_missing:
                equal = equal[np.argpartition(-seqs[equal], num_missing - 1)[:num_missing]]

            matches = np.concatenate([before, equal])

        matches = matches[np.lexsort((-seqs[matches], keys[matches]))]
        page = matches[:size]
        last = cursor(float(values[page[-1]]), int(seqs[page[-1]])) if len(matches) > size else None
        rows = self.rows((page + 1).tolist(), selection.text)
        return Listing(rows, total, last, is_cut)

    def histogram(self, selection: Selection, name: str) -> list[IndexBar]:
        """The bars of `reward`, `tokens` or `age` of the selected attempts. The range of that
        column itself is ignored."""
        ranges = {key: value for key, value in selection.ranges.items() if key != name}
        free = msgspec.structs.replace(selection, ranges=ranges, after=None)
        table = self._table()
        where, _ = self._where(table, free)
        values = table[RANGES[name]]
        if name == "age":
            where = where & (values != NONE)
        return bars(_of(values, where), _of(table["success"], where), is_whole=name != "reward")

    def group(self, group_id: str) -> list[IndexRow]:
        """The attempts of a group in the order of their numbers."""
        places = self._all(
            "SELECT place FROM attempts WHERE group_id = ? AND alive "
            "ORDER BY attempt, seq LIMIT 500",
            (group_id,),
        )
        return self.rows([row[0] for row in places])

    def step_groups(
        self, selection: Selection, *, after: str | None = None, limit: int = 24
    ) -> tuple[list[list[IndexRow]], str | None, int]:
        """Whole groups that contain a selected attempt, the id after which the next page begins,
        and the number of groups. They are in the order of their ids. If attempts are ordered by
        reward, they are in the order of the mean reward of their completed attempts."""
        table = self._table()
        where, _ = self._where(table, selection)
        places = (np.flatnonzero(where) + 1).tolist()
        sums: dict[str, tuple[float, float]] = {}
        for chunk in _chunks(places, 5_000):
            marks = ", ".join("?" * len(chunk))
            query = (
                "SELECT group_id, total(iif(status = 'completed', reward, 0)), "
                "total(status = 'completed') FROM attempts "
                f"WHERE place IN ({marks}) GROUP BY group_id"
            )
            for name, reward, number in self._all(query, chunk):
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + reward, before[1] + number)

        sign = {"worst": 1.0, "best": -1.0}.get(selection.order, 0.0)
        keys = {
            name: (sign * sums[name][0] / max(sums[name][1], 1), _natural(name)) for name in sums
        }
        ordered = sorted(sums, key=keys.__getitem__)
        last = None if after is None else keys.get(after, (0.0, _natural(after)))
        start = 0 if last is None else sum(keys[name] <= last for name in ordered)
        page = ordered[start : start + limit]
        next_after = page[-1] if start + limit < len(ordered) else None
        return [self.group(name) for name in page], next_after, len(ordered)

    def find(self, attempt_id: str) -> IndexRow | None:
        """An attempt by its id."""
        places = self._all("SELECT place FROM attempts WHERE id = ? AND alive", (attempt_id,))
        rows = self.rows([row[0] for row in places])
        return rows[0] if rows else None

    def words(self, selection: Selection, name: str) -> list[tuple[str, int]]:
        """The words of a filter, with the number of selected attempts that have each. The filter's
        own choice is ignored."""
        choices = {key: value for key, value in selection.choices.items() if key != name}
        table = self._table()
        where, _ = self._where(table, msgspec.structs.replace(selection, choices=choices))
        numbers: dict[int, str] = dict(enumerate(CHOICES.get(name, ())))
        if name == "outcome":
            good = np.count_nonzero(table["success"] & where)
            counts = np.array([good, np.count_nonzero(where) - good])
        elif name in CHOICES:
            values = _of(table[name], where)
            counts = np.bincount(_of(values, values >= 0))
        else:
            counts = np.bincount(_of(table[WORDS[name]], where))
            rows = self._all("SELECT number, text FROM words")
            numbers = {int(row[0]): str(row[1]) for row in rows}

        word_counts = [
            (numbers[i], int(counts[i])) for i in np.flatnonzero(counts).tolist() if numbers.get(i)
        ]
        return sorted(word_counts, key=lambda word: -word[1])[:50]

    def count(self, selection: Selection) -> tuple[int, int, float | None, float | None]:
        """The number of selected attempts, successes, the mean reward and its standard
        deviation."""
        table = self._table()
        where, _ = self._where(table, selection)
        rewards = _of(table["reward"], where)
        if not len(rewards):
            return 0, 0, None, None
        good = int(np.count_nonzero(table["success"] & where))
        return len(rewards), good, float(rewards.mean()), float(rewards.std())

    def has_values(self, selection: Selection) -> dict[str, bool]:
        """Maps an order to whether any selected attempt has a value for it."""
        table = self._table()
        where, _ = self._where(table, selection)
        has_value = {}
        for order, (column, _, _) in ORDERS.items():
            values = table[column]
            if column == "age":
                has_value[order] = bool((where & (values != NONE)).any())
            elif values.dtype.kind == "f":
                has_value[order] = bool((where & ~np.isnan(values)).any())
            else:
                has_value[order] = bool(where.any())

        return has_value

    def steps(self) -> list[tuple[int, float, int, dict[str, Any]]]:
        """Committed steps: number, time, attempts, facts of the plan."""
        rows = self._all(
            "SELECT step, committed_at, num_trajectories, plan FROM steps ORDER BY step"
        )
        return [(row[0], row[1], row[2], json.loads(row[3] or "{}")) for row in rows]

    def rows(self, places: Sequence[int], text: str = "") -> list[IndexRow]:
        """Rows in this order, with a snippet around the searched text."""
        rows_by_place: dict[int, sqlite3.Row] = {}
        for chunk in _chunks(list(places), 500):
            marks = ", ".join("?" * len(chunk))
            query = (
                "SELECT a.*, w.text AS kind_text FROM attempts a JOIN words w ON w.number = a.kind "
                f"WHERE place IN ({marks})"
            )
            rows_by_place.update((row["place"], row) for row in self._all(query, chunk))

        return [self._row(rows_by_place[place], text) for place in places if place in rows_by_place]

    def _row(self, row: sqlite3.Row, text: str) -> IndexRow:
        fields = {name: row[name] for name in IndexRow.__struct_fields__[:-2]}
        fields |= {
            "success": bool(row["success"]),
            "truncated": bool(row["truncated"]),
            "is_read": bool(row["is_read"]),
            "metrics": json.loads(row["metrics"]),
            "kind": row["kind_text"],
        }

        snippet: tuple[str, ...] = ()
        if text:
            data = self._all("SELECT text FROM texts WHERE place = ?", (row["place"],))
            snippet = _snippet(unpack_text(data[0][0]), text) if data else ()

        return IndexRow(**fields, snippet=snippet)

    def _where(self, table: dict[str, np.ndarray], selection: Selection) -> tuple[np.ndarray, bool]:
        """[N] bool: the selected rows, read-only. Also whether a search was cut. A page uses the
        same selection many times, so inside `steady` it is computed once."""
        cache = getattr(self._local, "cache", None)
        if cache is None:
            return self._select(table, selection)

        key = msgspec.json.encode(msgspec.structs.replace(selection, order="newest", after=None))
        if key not in cache:
            cache[key] = self._select(table, selection)

        selected: tuple[np.ndarray, bool] = cache[key]
        return selected

    def _select(
        self, table: dict[str, np.ndarray], selection: Selection
    ) -> tuple[np.ndarray, bool]:
        where = table["alive"].copy()
        if selection.step is not None:
            trained = table["trained_step"] == selection.step
            waiting = (table["trained_step"] == NONE) & (table["step"] == selection.step)
            where &= trained | waiting
            if "split" not in selection.choices:
                where &= table["split"] == SPLITS.index("train")

        if selection.task:
            number = self.ask("SELECT number FROM tasks WHERE id = ?", (selection.task,))
            where &= table["task"] == (number[0][0] if number else NONE)

        for name, value in selection.choices.items():
            if name == "outcome":
                where &= table["success"] == (value == "success")
            elif name in COLUMN_WORDS:
                where &= table[name] == COLUMN_WORDS[name].index(value)
            else:
                number = self._all("SELECT number FROM words WHERE text = ?", (value,))
                where &= table[WORDS[name]] == (number[0][0] if number else -2)

        for name, (low, high) in selection.ranges.items():
            values = table[RANGES[name]]
            where &= (values >= low) & (values <= high)
            if name == "age":
                where &= values != NONE

        if not selection.text:
            return where, False

        places, is_cut = self._search(selection.text)
        has_text = np.zeros(len(where), dtype=bool)
        has_text[places[places < len(where)]] = True
        return where & has_text, is_cut

    def _search(self, text: str) -> tuple[np.ndarray, bool]:
        """The places in the columns of the newest attempts with the text, and whether there are
        more."""
        cache = getattr(self._local, "cache", None)
        if cache is not None and text in cache:
            matches: tuple[np.ndarray, bool] = cache[text]
            return matches

        query = match_of(text)
        places = np.zeros(0, dtype=np.int64)
        if query:
            # All places come in one text, because a Python row for each of 200,000 places takes
            # four times as long.
            ((text_of_places,),) = self._all(
                "SELECT group_concat(rowid) FROM (SELECT rowid FROM search WHERE search MATCH ? "
                "ORDER BY rowid DESC LIMIT ?)",
                (query, MAX_FOUND + 1),
            )
            if text_of_places:
                places = np.fromstring(text_of_places, dtype=np.int64, sep=",") - 1

        matches = (places[:MAX_FOUND], len(places) > MAX_FOUND)
        if cache is not None:
            cache[text] = matches

        return matches

    @contextmanager
    def steady(self) -> Iterator[None]:
        """In this block, the thread reads the columns, and computes a selection, only once."""
        self._local.cache = {}
        try:
            yield
        finally:
            self._local.cache = None

    def columns(self) -> dict[str, np.ndarray]:
        """Maps a name to its column of all rows, read-only."""
        return self._table()

    def words_by_number(self) -> dict[int, str]:
        """The words that the numbers in the columns `kind`, `difficulty`, `decoding`, ... mean."""
        return {int(row[0]): str(row[1]) for row in self.ask("SELECT number, text FROM words")}

    def task_states(self) -> tuple[dict[str, int], float]:
        """Maps a state of the ledger to its number of tasks. Also the Unix time when they were
        counted."""
        facts = dict(self._all("SELECT name, value FROM facts WHERE name LIKE 'task_states%'"))
        return json.loads(facts.get("task_states", "{}")), float(facts.get("task_states_at", 0.0))

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query on the index's tables (database.py)."""
        return self._all(query, values)

    def _table(self) -> dict[str, np.ndarray]:
        cache = getattr(self._local, "cache", None)
        if cache is None:
            return self._read_table()
        if "" not in cache:
            cache[""] = self._read_table()
        table: dict[str, np.ndarray] = cache[""]
        return table

    def _read_table(self) -> dict[str, np.ndarray]:
        try:
            table = self._columns.table(self._connection())
        except (sqlite3.Error, TypeError) as error:
            raise self._away(error) from error

        ages = table["trained_step"] - 1 - table["lowest_version"]
        unknown = (table["trained_step"] == NONE) | (table["lowest_version"] == NONE)
        table["age"] = np.where(unknown, NONE, ages)
        table["surprise"] = np.abs(table["advantage"])
        return table

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection().execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._away(error) from error

    def _away(self, error: BaseException) -> IndexUnavailableError:
        self._local.connection = None
        return IndexUnavailableError(f"the index is not there yet, or is being rebuilt ({error})")

    def _connection(self) -> sqlite3.Connection:
        """The connection of this thread. A new connection if the file was made again. Raises
        sqlite3.Error."""
        try:
            inode = self._path.stat().st_ino
        except OSError as error:
            raise sqlite3.OperationalError("no index") from error

        opened = getattr(self._local, "connection", None)
        if opened is None or self._local.inode != inode:
            if opened is not None:
                opened.close()
            self._local.connection = opened = connect(self._path)
            self._local.inode = inode

        connection: sqlite3.Connection = opened
        return connection


def _of(column: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The selected values. The column itself if all are selected."""
    return column if where.all() else column[where]


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


def _snippet(content: str, text: str) -> tuple[str, ...]:
    """Text, matched word and text in turn, around the first match."""
    words = [w.strip('*"') for w in re.findall(r'"[^"]*"|[^\s"]+', text) if not w.startswith("-")]
    words = [word for word in words if word]
    if not words:
        return ()

    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    first = pattern.search(content)
    if first is None:  # the search matches more forms of letters than this pattern
        return (content[:SNIPPET],)

    start = max(0, first.start() - SNIPPET // 3)
    shown = content[start : start + SNIPPET]
    pieces = ["…" if start else ""]
    end = 0
    for match in pattern.finditer(shown):
        pieces[-1] += shown[end : match.start()]
        pieces += [match[0], ""]
        end = match.end()

    pieces[-1] += shown[end:]
    return tuple(pieces)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key that orders numbers in names by their size."""
    return [
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
        for piece in re.split(r"(\d{1,18})", name)
        if piece
    ]


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
