"""Writes rows of an index. Every method is a transaction, or part of the caller's transaction.

Invariants. (1) `change` of a row is larger than that of all rows that changed before. (2) If a
row's content has changed (it was written at another time, or at another place), it keeps no value
that was read from the old content. (3) The search knows the text of a row if and only if `texts`
contains it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentevo.rollout.failures import failure_kind
from agentevo.store.records import StepRecord, TrajectorySummary
from agentevo_ui.index.database import MAX_TEXT_BYTES
from agentevo_ui.index.derived import Derived, TaskWords, judge_gap, unpack_text

MAX_WORDS = 2_000
"""The maximum number of words that filters choose from. Further words become `other`."""
OTHER = "other"
_LISTED = set(TrajectorySummary.__struct_fields__)
_MADE = ("seq", "task", "agent", "decoding", "error_kind", "reason", "judge_gap")
_GIVEN = (*sorted(_LISTED - {"id"}), *_MADE)
"""The columns of a row that come from a summary, except the id."""
_LEDGER = ("state", "trained_step", "drop_reason", "reason")
_SAME = "seq = excluded.seq AND written_at = excluded.written_at"
_NULL = dict.fromkeys(("lowest_logprob", "mean_logprob", "lowest_version"), "NULL")
_OF_CONTENT = {"is_read": "0", "kind": "0", "difficulty": "0", **_NULL}
"""Maps the columns that are read from the turns to their initial values."""
_UPSERT = (
    f"INSERT INTO attempts (id, change, {', '.join(_GIVEN)}) "
    f"VALUES (:id, :change, {', '.join(f':{name}' for name in _GIVEN)}) "
    "ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _GIVEN)
    + ", change = excluded.change, alive = 1, "
    + ", ".join(
        f"{name} = CASE WHEN {_SAME} THEN {name} ELSE {empty} END"
        for name, empty in _OF_CONTENT.items()
    )
    + "".join(
        f", {name} = CASE WHEN {_SAME} AND trained_step IS excluded.trained_step THEN {name} END"
        for name in ("advantage", "moved")
    )
    + f" WHERE NOT (alive AND {_SAME} AND "
    + " AND ".join(f"{name} IS excluded.{name}" for name in _LEDGER)
    + ")"
)


class IndexWriter:
    """Writes rows of an index. `rewards`: as in `derived.judge_gap`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        rewards: Mapping[str, tuple[float, bool]],
        *,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self._db = connection
        self._rewards = rewards
        self._max_bytes = max_text_bytes
        self._words = {
            row["text"]: row["number"] for row in self._db.execute("SELECT * FROM words")
        }

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: either the whole block takes effect or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            self._words = {
                row["text"]: row["number"] for row in self._db.execute("SELECT * FROM words")
            }
            raise

        self._db.execute("COMMIT")

    def fact(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_facts(self, **facts: Any) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def put(self, rows: Sequence[tuple[int, TrajectorySummary]]) -> None:
        """Writes (seq, summary) of rows as the store has them now. Unchanged rows stay as they
        are."""
        self._forget_clashes(rows)
        change = self._next_change()
        tasks = self._numbers_of_tasks(rows)
        values = [
            self._values(seq, row) | {"task": tasks[row.task_id], "change": change}
            for seq, row in rows
        ]
        self._db.executemany(_UPSERT, values)

    def _numbers_of_tasks(self, rows: Sequence[tuple[int, TrajectorySummary]]) -> dict[str, int]:
        names = list(dict.fromkeys(row.task_id for _, row in rows))
        self._db.executemany(
            "INSERT OR IGNORE INTO tasks (id) VALUES (?)", [(name,) for name in names]
        )

        numbers: dict[str, int] = {}
        for start in range(0, len(names), 500):
            some = names[start : start + 500]
            marks = ", ".join("?" * len(some))
            query = f"SELECT id, number FROM tasks WHERE id IN ({marks})"
            numbers.update((row["id"], row["number"]) for row in self._db.execute(query, some))

        return numbers

    def _forget_clashes(self, rows: Sequence[tuple[int, TrajectorySummary]]) -> None:
        """If another row has the number of one of these rows, it is gone from the store."""
        if not rows:
            return

        existing = self._db.execute(
            "SELECT place, id, seq FROM attempts WHERE alive AND seq BETWEEN ? AND ?",
            (rows[0][0], rows[-1][0]),
        )
        names = {seq: row.id for seq, row in rows}
        self.bury(
            [row["place"] for row in existing if names.get(row["seq"], row["id"]) != row["id"]]
        )

    def _values(self, seq: int, row: TrajectorySummary) -> dict[str, Any]:
        values = {name: getattr(row, name) for name in _LISTED}
        agent = row.group_id.rpartition("@")[2].partition(":")[2]
        kind = failure_kind(row.error) if row.status != "completed" else ""
        return values | {
            "metrics": json.dumps(row.metrics),
            "seq": seq,
            "agent": self.word(agent),
            "decoding": self.word(decoding_of(row)),
            "error_kind": self.word(kind),
            "reason": self.word(row.drop_reason or ""),
            "judge_gap": judge_gap(row.metrics, self._rewards) if self._rewards else None,
        }

    def word(self, text: str) -> int:
        """The number of a word. Above the limit, the number of OTHER."""
        text = text[:200]
        number = self._words.get(text)
        if number is None:
            if len(self._words) >= MAX_WORDS and text != OTHER:
                return self.word(OTHER)
            number = len(self._words)
            self._db.execute("INSERT INTO words VALUES (?, ?)", (number, text))
            self._words[text] = number

        return number

    def bury(self, places: Iterable[int]) -> None:
        """Marks rows that the store no longer has, and deletes their texts."""
        change = self._next_change()
        for place in places:
            self._forget_text(place)
            self._db.execute(
                "UPDATE attempts SET alive = 0, is_read = 0, change = ? WHERE place = ?",
                (change, place),
            )

    def read(self, rows: Sequence[tuple[int, Derived, TaskWords]]) -> None:
        """Writes (place, values read from the turns, words of the task)."""
        change = self._next_change()
        has_room = self.has_room()
        for place, derived, _ in rows:
            self._forget_text(place)
            if has_room:
                self._db.execute("INSERT INTO texts VALUES (?, ?)", (place, derived.text))
                text = unpack_text(derived.text)
                self._db.execute("INSERT INTO search (rowid, text) VALUES (?, ?)", (place, text))

        self._db.executemany(
            "UPDATE attempts SET is_read = 1, lowest_logprob = ?, mean_logprob = ?, "
            "lowest_version = ?, kind = ?, difficulty = ?, change = ? WHERE place = ?",
            [
                (*derived[:3], self.word(of.kind), self.word(of.difficulty), change, place)
                for place, derived, of in rows
            ],
        )

    def has_room(self) -> bool:
        """Whether texts are still added."""
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        size = self._db.execute("PRAGMA page_size").fetchone()[0]
        return bool(pages * size < self._max_bytes)

    def _forget_text(self, place: int) -> None:
        row = self._db.execute("SELECT text FROM texts WHERE place = ?", (place,)).fetchone()
        if row is not None:
            self._db.execute(
                "INSERT INTO search (search, rowid, text) VALUES ('delete', ?, ?)",
                (place, unpack_text(row["text"])),
            )
            self._db.execute("DELETE FROM texts WHERE place = ?", (place,))

    def put_steps(self, records: Iterable[StepRecord]) -> None:
        """Records steps with which the rows agree. `mark` is a step's identity."""
        self._db.executemany(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, 0, 0)",
            [
                (
                    record.step,
                    record.committed_at,
                    mark_of(record),
                    record.num_trajectories,
                    json.dumps(_plan_facts(record)),
                )
                for record in records
            ],
        )

    def forget_steps(self, after: int) -> None:
        """Deletes later steps, and the values that they added to their attempts."""
        self._db.execute("DELETE FROM steps WHERE step > ?", (after,))
        self._db.execute(
            "UPDATE attempts SET advantage = NULL, moved = NULL, change = ? WHERE trained_step > ?",
            (self._next_change(), after),
        )

    def put_advantages(self, step: int, largest: Mapping[str, float]) -> None:
        """`largest`: maps an id to the advantage of its tokens that is farthest from 0, with its
        sign."""
        change = self._next_change()
        self._db.executemany(
            "UPDATE attempts SET advantage = ?, change = ? WHERE id = ? AND trained_step = ?",
            [(value, change, name, step) for name, value in largest.items()],
        )
        self._db.execute("UPDATE steps SET has_advantages = 1 WHERE step = ?", (step,))

    def put_moves(self, step: int, largest: Mapping[str, float]) -> None:
        """`largest`: maps an id to the largest log-prob change of one of its tokens."""
        change = self._next_change()
        self._db.executemany(
            "UPDATE attempts SET moved = ?, change = ? WHERE id = ? AND trained_step = ?",
            [(value, change, name, step) for name, value in largest.items()],
        )
        self._db.execute("UPDATE steps SET has_moves = 1 WHERE step = ?", (step,))

    def _next_change(self) -> int:
        newest = self._db.execute("SELECT max(change) FROM attempts").fetchone()[0] or 0
        return int(newest) + 1

    def note_gaps(self, seqs: Sequence[int], after: int, times: Sequence[float]) -> None:
        """Records numbers that were skipped before rows which were written a short time ago."""
        now = time.time()
        for seq, written_at in zip(seqs, times, strict=True):
            if seq > after + 1 and now - written_at < GAP_S:
                self._db.execute(
                    "INSERT OR REPLACE INTO gaps VALUES (?, ?, ?)", (after + 1, seq - 1, now)
                )
            after = seq


GAP_S = 600.0
"""The longest time in seconds until a transaction with numbers commits: more than any store
allows."""


def decoding_of(row: TrajectorySummary) -> str:
    """How a held-out attempt was decoded (`greedy`, `sampled`), as the run's evaluation wrote it
    into the group's id, with the part that distinguishes two evaluations of a step. Else empty."""
    label = row.group_id.rpartition("@")[0].rpartition("/")
    is_labelled = row.split == "eval" and bool(label[1])
    return label[2] if is_labelled and label[2].endswith(("greedy", "sampled")) else ""


def mark_of(record: StepRecord) -> str:
    """The part that distinguishes a commit of a step from another commit of the same step."""
    return f"{record.committed_at!r} {record.record.get('chain', '')}"


def _plan_facts(record: StepRecord) -> dict[str, Any]:
    """The facts of a step's plan that a page shows without the store."""
    plan = record.record.get("plan")
    if not isinstance(plan, dict):
        return {}
    dropped = plan.get("dropped")
    counts = {k: len(v) for k, v in dropped.items()} if isinstance(dropped, dict) else {}
    rest = {k: plan[k] for k in ("staleness", "policy", "credit", "masked_tokens") if k in plan}
    return rest | {"dropped": counts}
