"""Updates an index from its store, through the Store protocol only.

Invariants. (1) `change` of a row is larger than that of all rows that changed before. (2) Values
that were read from a row's turns, or computed for its step, go when its content or its step
changes. (3) After `refresh`, every row that the store's commits changed equals the store's row.
Rows that a rewind deleted are detected by the newest step, which is then gone or differs, by the
newest rows, or by the next comparison of the numbers; then all rows are compared.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentevo.errors import AgentEvoError, StoreError
from agentevo.rollout.failures import failure_kind
from agentevo.runtime.event_loop import in_thread
from agentevo.store.records import StepRecord, StoredTrajectory, TrajectorySummary
from agentevo.store.store import Store
from agentevo.training.token_numbers import largest_moves, name_of
from agentevo_ui.index.advantages import (
    Rule,
    config_of,
    largest,
    read_stored,
    rewards_of,
    rule_of,
    step_samples,
)
from agentevo_ui.index.database import MAX_FILE_BYTES
from agentevo_ui.index.derived import TaskWords, derive, judge_gap, task_words

ROWS = 1_000
"""The number of summaries that are read at once."""
TURNS = 32
"""The number of attempts that are read at once with their turns."""
OVERLAP = 200
"""The number of the newest rows that every refresh reads again. A transaction of PostgreSQL takes
its numbers before it commits, so rows may appear before the newest one."""
MAX_REREAD_ROWS = 2_000
"""The number of open rows that are read again if no step was committed: the newest ones."""
MAX_CACHED_TASKS = 10_000
END = 2**62

_LISTED = TrajectorySummary.__struct_fields__
_COLUMNS = ("seq", "change", *_LISTED, "agent", "decoding", "error_kind", "judge_gap")
_PUT = (
    f"INSERT INTO attempts (alive, {', '.join(_COLUMNS)}) "
    f"VALUES (1, {', '.join(f':{name}' for name in _COLUMNS)}) ON CONFLICT (seq) DO UPDATE SET "
    + "".join(f"{name} = excluded.{name}, " for name in _COLUMNS[1:])
    + "alive = 1, "
    + ", ".join(
        f"{name} = CASE WHEN trained_step IS excluded.trained_step THEN {name} ELSE {empty} END"
        for name, empty in (("is_valued", 0), ("advantage", "NULL"), ("moved", "NULL"))
    )
    + " WHERE NOT alive OR state IS NOT excluded.state OR drop_reason IS NOT excluded.drop_reason "
    "OR trained_step IS NOT excluded.trained_step"
)
_OPEN = (
    "SELECT seq FROM attempts WHERE alive AND split = 'train' AND state IN ('ready', 'reserved') "
    "ORDER BY seq DESC LIMIT ?"
)


class StoreFollower:
    """Updates the index of a store. `folder`: the run's folder, if there is one, which says how
    advantages are computed."""

    def __init__(
        self, store: Store, connection: sqlite3.Connection, folder: Path | None = None
    ) -> None:
        self._store = store
        self._db = connection
        self._folder = folder
        self._config = config_of(folder)
        self._rewards = rewards_of(self._config)
        self._rule: Rule | str | None = None
        self._words: dict[str, TaskWords] = {}
        self._told_at = 0.0

    async def refresh(self, *, compare: bool = False) -> None:
        """Updates everything except values from turns. `compare`: whether to compare the numbers of
        rows too."""
        marked = json.loads(self._value("SELECT value FROM facts WHERE name = 'step'") or "null")
        is_rewound = marked is not None and marked != await self._mark(marked[0])

        newest = self._value("SELECT max(seq) FROM attempts WHERE alive") or 0
        is_rewound |= await self._list(max(newest - OVERLAP, 0), END)
        if is_rewound or (compare and not await self._agrees()):
            await self._list(0, newest, phase="comparing")

        record = await self._store.last_step()
        last = None if record is None else _mark_of(record)
        rows = self._db.execute(_OPEN, (MAX_REREAD_ROWS if last == marked else -1,))
        for first, end in _ranges(sorted(row["seq"] for row in rows)):
            await self._list(first, end)

        self.set_facts(step=json.dumps(last))

    async def _list(self, first: int, end: int, phase: str = "listing") -> bool:
        """Makes the rows from `first` to `end` equal to the store's. Returns whether the store no
        longer has some of them."""
        has_lost = False
        while first <= end:
            rows = await self._store.written_summaries(range(first, end + 1), limit=ROWS)
            until = rows[-1][0] if len(rows) == ROWS else end
            contents = {seq: (row.id, row.written_at) for seq, row in rows}
            indexed = self._db.execute(
                "SELECT seq, id, written_at FROM attempts WHERE alive AND seq BETWEEN ? AND ?",
                (first, until),
            ).fetchall()
            lost = [seq for seq, *content in indexed if contents.get(seq) != tuple(content)]
            has_lost |= bool(lost)
            with self._transaction() as change:
                self._bury(lost, change)
                self._db.executemany(_PUT, [self._row(seq, row, change) for seq, row in rows])

            first = until + 1
            if len(rows) == ROWS and time.monotonic() - self._told_at > 0.5:
                self.set_facts(phase=phase, done=until, of=end)
                self._told_at = time.monotonic()

        return has_lost

    def _row(self, seq: int, row: TrajectorySummary, change: int) -> dict[str, Any]:
        return {name: getattr(row, name) for name in _LISTED} | {
            "seq": seq,
            "change": change,
            "metrics": json.dumps(row.metrics),
            "agent": row.group_id.rpartition("@")[2].partition(":")[2],
            "decoding": _decoding(row),
            "error_kind": failure_kind(row.error) if row.status != "completed" else "",
            "judge_gap": judge_gap(row.metrics, self._rewards) if self._rewards else None,
        }

    def _bury(self, seqs: Iterable[int], change: int) -> None:
        """Empties rows that the store no longer has."""
        for seq in seqs:
            self._db.execute("DELETE FROM search WHERE rowid = ?", (seq,))
            self._db.execute(
                "REPLACE INTO attempts (seq, alive, change) VALUES (?, 0, ?)", (seq, change)
            )

    async def _agrees(self) -> bool:
        """Whether store and index have the same number of rows in every split and state."""
        rows = self._db.execute(
            "SELECT split, state, count(*) FROM attempts WHERE alive GROUP BY 1, 2"
        )
        counts = {f"trajectories/{split}/{state}": number for split, state, number in rows}
        store_counts = await self._store.counts()
        tasks = {
            name.removeprefix("tasks/"): count
            for name, count in store_counts.items()
            if name.startswith("tasks/")
        }
        self.set_facts(task_states=json.dumps(tasks), task_states_at=time.time())

        return all(
            counts.get(name, 0) == count
            for name, count in store_counts.items()
            if name.startswith("trajectories/")
        )

    async def read_some(self, limit: int = TURNS) -> int:
        """Reads the turns of up to `limit` rows that are not read yet, the newest first. Returns
        the number of rows."""
        unread = self._db.execute(
            "SELECT seq, id FROM attempts WHERE alive AND NOT is_read ORDER BY seq DESC LIMIT ?",
            (limit,),
        ).fetchall()
        names = {row["seq"]: row["id"] for row in unread}
        stored: dict[int, StoredTrajectory] = {}
        for first, end in _ranges(sorted(names), slack=1):
            stored.update(await self._store.written(range(first, end + 1), limit=limit))

        same = [seq for seq in names if seq in stored and stored[seq].trajectory.id == names[seq]]
        trajectories = [stored[seq].trajectory for seq in same]
        words = [await self._words_of(trajectory.task_id) for trajectory in trajectories]
        derived = await in_thread(lambda: [derive(trajectory) for trajectory in trajectories])
        with self._transaction() as change:
            if self._has_room():
                texts = zip(same, (values.text for values in derived), strict=True)
                self._db.executemany("REPLACE INTO search (rowid, text) VALUES (?, ?)", texts)

            self._db.executemany(
                "UPDATE attempts SET is_read = 1, lowest_logprob = ?, lowest_version = ?, "
                "kind = ?, difficulty = ?, change = ? WHERE seq = ?",
                [
                    (values.lowest_logprob, values.lowest_version, *of, change, seq)
                    for seq, values, of in zip(same, derived, words, strict=True)
                ],
            )
            self._bury(names.keys() - set(same), change)

        return len(names)

    def _has_room(self) -> bool:
        pages = int(self._value("PRAGMA page_count"))
        return pages * int(self._value("PRAGMA page_size")) < MAX_FILE_BYTES

    async def _words_of(self, task_id: str) -> TaskWords:
        if task_id not in self._words:
            if len(self._words) > MAX_CACHED_TASKS:
                self._words.clear()
            try:
                self._words[task_id] = task_words(await self._store.task(task_id))
            except StoreError:  # attempts whose task is not in the store
                self._words[task_id] = TaskWords()

        return self._words[task_id]

    async def value_some(self) -> bool:
        """Adds the advantages of the newest committed step that has none yet, and the log-prob
        changes that the run's folder has. Returns whether there was such a step."""
        unvalued = "alive AND NOT is_valued AND state = 'committed'"
        step = self._value(f"SELECT max(trained_step) FROM attempts WHERE {unvalued}")
        if step is None or self._folder is None:
            return False

        moves = await in_thread(largest_moves, self._folder / name_of(step))
        advantages = await self._advantages(step)
        with self._transaction() as change:
            self._db.execute(
                f"UPDATE attempts SET is_valued = 1 WHERE {unvalued} AND trained_step = ?", (step,)
            )
            for name, values in (("advantage", advantages), ("moved", moves)):
                self._db.executemany(
                    f"UPDATE attempts SET {name} = ?, change = ? WHERE id = ? AND trained_step = ?",
                    [(value, change, id, step) for id, value in values.items()],
                )

        return True

    async def _advantages(self, step: int) -> Mapping[str, float]:
        """Empty if the advantages can't be recomputed."""
        if self._rule is None:  # only now, because it imports torch
            self._rule = await in_thread(rule_of, self._config)

        records = await self._store.steps(after=step - 1, limit=1)
        if isinstance(self._rule, str) or not records or records[0].step != step:
            return {}

        with suppress(AgentEvoError):  # a record without a plan, or attempts that are gone
            stored = await read_stored(self._store, records[0])
            return largest(
                await in_thread(step_samples, step, records[0].record, stored, self._rule)
            )
        return {}

    def num_unread(self) -> int:
        return int(self._value("SELECT count(*) FROM attempts WHERE alive AND NOT is_read"))

    def newest_written_at(self) -> float:
        """The time of the store's newest row, in Unix time."""
        query = "SELECT written_at FROM attempts WHERE alive ORDER BY seq DESC LIMIT 1"
        return float(self._value(query) or 0.0)

    def set_facts(self, **facts: Any) -> None:
        self._db.executemany("REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    async def _mark(self, step: int) -> list[Any] | None:
        records = await self._store.steps(after=step - 1, limit=1)
        return _mark_of(records[0]) if records else None

    @contextmanager
    def _transaction(self) -> Iterator[int]:
        """A transaction, and `change` for its rows. The whole block takes effect or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield int(self._value("SELECT max(change) FROM attempts") or 0) + 1
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

        self._db.execute("COMMIT")

    def _value(self, query: str, values: tuple[Any, ...] = ()) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]


def _mark_of(record: StepRecord) -> list[Any]:
    """What distinguishes a commit from others: the step, its time and its chain."""
    return [record.step, record.committed_at, record.record.get("chain")]


def _decoding(row: TrajectorySummary) -> str:
    """How a held-out attempt was decoded (`greedy`, `sampled`), as the run's evaluation wrote it
    into the group's id, with the part that distinguishes two evaluations of a step. Else empty."""
    label = row.group_id.rpartition("@")[0].rpartition("/")
    is_labelled = row.split == "eval" and bool(label[1])
    return label[2] if is_labelled and label[2].endswith(("greedy", "sampled")) else ""


def _ranges(numbers: Sequence[int], slack: int = 16) -> list[tuple[int, int]]:
    """Ranges that cover the sorted numbers. Numbers that are close to each other share a range."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number - ranges[-1][1] <= slack:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
