"""Updates an index from its store, through the Store protocol only.

    catch_up    new rows in the order of writing, columns only
    settle      commits and drops of open rows; skipped numbers
    sweep       compares every row from a number on with the store: after a rewind, or if the
                numbers of rows differ
    read_some   reads the turns of unread rows, newest first

Invariant: after catch_up and settle, every row that the store's commits changed equals the store's
row. Rows that a rewind deleted are detected by the newest step, which is then gone or differs, by
the newest row, or by the next comparison of the numbers.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentevo.errors import AgentEvoError, StoreError
from agentevo.runtime.event_loop import in_thread
from agentevo.store.records import StepRecord, StoredTrajectory
from agentevo.store.store import Store
from agentevo.training.token_numbers import largest_moves, name_of
from agentevo_ui.index.advantages import Rule, largest, step_samples, without_words
from agentevo_ui.index.derived import TaskWords, derive, task_words
from agentevo_ui.index.writer import GAP_S, IndexWriter, mark_of

ROWS = 1_000
"""The number of summaries that are read at once."""
TURNS = 32
"""The number of attempts that are read at once with their turns."""
STEPS = 50
"""The number of steps whose records are read at once."""
MAX_REREAD_ROWS = 2_000
"""The number of open rows that are read again at once if no step was committed. The next refresh
continues."""
END = 2**62


class StoreFollower:
    """Updates the index of a store. `notify` is called with the progress: (phase, done, total)."""

    def __init__(
        self,
        store: Store,
        connection: sqlite3.Connection,
        writer: IndexWriter,
        notify: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        self._store = store
        self._db = connection
        self._writer = writer
        self._notify = notify
        self._words: dict[str, TaskWords] = {}
        self._reread_place = -1

    async def refresh(self, *, compare: bool = False) -> None:
        """Updates everything except values from turns. `compare`: whether to compare the numbers of
        rows too."""
        back_to = await self._rewound_to()
        if back_to is not None:
            await self._undo(back_to)
        await self._catch_up()
        await self._settle()
        if compare and not await self._agrees():
            await self._sweep(0)

    async def _rewound_to(self) -> int | None:
        """The last step that the index and the store share, if the store was rewound."""
        last_step = self._first_row("SELECT * FROM steps ORDER BY step DESC LIMIT 1")
        newest = self._first_row(
            "SELECT seq, id, written_at FROM attempts WHERE alive ORDER BY seq DESC LIMIT 1"
        )
        if last_step is not None:
            record = await self.record_of(last_step["step"])
            if record is None or mark_of(record) != last_step["mark"]:
                return await self._last_common()

        if newest is not None:
            rows = await self._store.written_summaries(
                range(newest["seq"], newest["seq"] + 1), limit=1
            )
            same = [row for _, row in rows if row.id == newest["id"]]
            if not same or same[0].written_at != newest["written_at"]:
                return await self._last_common()

        return None

    async def _last_common(self) -> int:
        """Finds the step by bisection, because all steps before a common step are common too."""
        marks = [
            (row["step"], row["mark"])
            for row in self._db.execute("SELECT * FROM steps ORDER BY step")
        ]
        low = 0
        high = len(marks)
        while low < high:
            middle = (low + high) // 2
            step, mark = marks[middle]
            record = await self.record_of(step)
            if record is not None and mark_of(record) == mark:
                low = middle + 1
            else:
                high = middle

        return marks[low - 1][0] if low else 0

    async def _undo(self, step: int) -> None:
        """After a rewind, compares all rows that it may have changed."""
        touched = self._first_row(
            "SELECT min(seq) FROM attempts WHERE alive AND (step > ? OR trained_step > ? "
            "OR seq = (SELECT max(seq) FROM attempts WHERE alive))",
            (step, step),
        )
        with self._writer.transaction():
            self._writer.forget_steps(step)

        await self._sweep((touched[0] or 0) if touched is not None and step else 0)

    async def _sweep(self, first: int) -> None:
        """Compares every row from number `first` on."""
        last = self._first_row("SELECT max(seq) FROM attempts WHERE alive")
        end = (last[0] or 0) if last else 0
        while first <= end:
            rows = await self._store.written_summaries(range(first, end + 1), limit=ROWS)
            until = rows[-1][0] if len(rows) == ROWS else end
            indexed = self._db.execute(
                "SELECT place, id FROM attempts WHERE alive AND seq BETWEEN ? AND ?", (first, until)
            ).fetchall()
            names = {row.id for _, row in rows}
            with self._writer.transaction():
                self._writer.bury([row["place"] for row in indexed if row["id"] not in names])
                self._writer.put(rows)

            first = until + 1
            self._notify("comparing", min(first, end), end)

    async def _catch_up(self) -> None:
        """Adds new rows until there are none."""
        after = self._cursor()
        while rows := await self._store.written_summaries(range(after + 1, END), limit=ROWS):
            with self._writer.transaction():
                self._writer.put(rows)
                self._writer.note_gaps(
                    [seq for seq, _ in rows], after, [row.written_at for _, row in rows]
                )

            after = rows[-1][0]
            self._notify("listing", after, 0)
            if len(rows) < ROWS:
                return

    def _cursor(self) -> int:
        row = self._first_row("SELECT max(seq) FROM attempts WHERE alive")
        return int(row[0] or 0) if row else 0

    async def _settle(self) -> None:
        """Adds newly committed steps, open rows, and skipped numbers."""
        is_moved = await self._new_steps()
        waiting = "alive AND split = 'train' AND state IN ('ready', 'reserved') AND seq > ?"
        rows = self._db.execute(
            f"SELECT seq FROM attempts WHERE {waiting} ORDER BY seq LIMIT ?",
            (-1, -1) if is_moved else (self._reread_place, MAX_REREAD_ROWS),
        ).fetchall()
        self._reread_place = rows[-1][0] if len(rows) == MAX_REREAD_ROWS and not is_moved else -1
        await self._read_again(_runs([row[0] for row in rows]))

        for gap in self._db.execute("SELECT * FROM gaps").fetchall():
            await self._read_again([(gap["first"], gap["last"])])
            if time.time() - gap["since"] > GAP_S:
                self._db.execute("DELETE FROM gaps WHERE first = ?", (gap["first"],))

    async def _new_steps(self) -> bool:
        """Adds the steps that were committed since the last call. Returns whether there are any."""
        newest = self._first_row("SELECT max(step) FROM steps")
        after = None if newest is None else newest[0]
        is_moved = False
        while new := await self._store.steps(after=after, limit=STEPS):
            with self._writer.transaction():
                self._writer.put_steps(new)
            after = new[-1].step
            is_moved = True

        return is_moved

    async def _read_again(self, runs: list[tuple[int, int]]) -> None:
        """Reads rows again by their numbers."""
        for first, last in runs:
            while first <= last:
                rows = await self._store.written_summaries(range(first, last + 1), limit=ROWS)
                indexed = self._db.execute(
                    "SELECT place, id FROM attempts WHERE alive AND seq BETWEEN ? AND ?",
                    (first, rows[-1][0] if len(rows) == ROWS else last),
                ).fetchall()
                names = {row.id for _, row in rows}
                with self._writer.transaction():
                    self._writer.bury([row["place"] for row in indexed if row["id"] not in names])
                    self._writer.put(rows)

                if len(rows) < ROWS:
                    break

                first = rows[-1][0] + 1

    async def _agrees(self) -> bool:
        """Whether store and index have the same number of rows in every split and state."""
        counts = {
            f"trajectories/{row['split']}/{row['state']}": row["n"]
            for row in self._db.execute(
                "SELECT split, state, count(*) AS n FROM attempts WHERE alive GROUP BY 1, 2"
            )
        }
        store_counts = await self._store.counts()
        tasks = {
            name.removeprefix("tasks/"): count
            for name, count in store_counts.items()
            if name.startswith("tasks/")
        }
        self._writer.set_facts(task_states=json.dumps(tasks), task_states_at=time.time())

        return all(
            counts.get(name, 0) == count
            for name, count in store_counts.items()
            if name.startswith("trajectories/")
        )

    async def read_some(self, limit: int = TURNS) -> int:
        """Reads the turns of up to `limit` rows that are not read yet, the newest first. Returns
        the number of rows."""
        rows = self._db.execute(
            "SELECT place, seq, id, task_id FROM attempts WHERE NOT is_read AND alive "
            "ORDER BY seq DESC LIMIT ?",
            (limit,),
        ).fetchall()
        if not rows:
            return 0

        places = {row["id"]: row["place"] for row in rows}
        trajectories: list[StoredTrajectory] = []
        for first, last in _runs(sorted(row["seq"] for row in rows), slack=1):
            page = await self._store.written(range(first, last + 1), limit=limit)
            trajectories += [stored for _, stored in page]

        trajectories = [stored for stored in trajectories if stored.trajectory.id in places]
        words = [await self._words_of(stored.trajectory.task_id) for stored in trajectories]
        numbers = await in_thread(lambda: [derive(stored.trajectory) for stored in trajectories])
        with self._writer.transaction():
            self._writer.read(
                [
                    (places[stored.trajectory.id], read, of)
                    for stored, read, of in zip(trajectories, numbers, words, strict=True)
                ]
            )
            missing = places.keys() - {stored.trajectory.id for stored in trajectories}
            self._writer.bury(places[name] for name in missing)

        return len(rows)

    def has_steps_to_value(self) -> bool:
        """Whether a committed step has no advantages yet."""
        return self._first_row("SELECT 1 FROM steps WHERE has_advantages = 0 LIMIT 1") is not None

    async def value_some(self, rule: Rule) -> bool:
        """Computes the advantages of the newest committed step that has none yet. Returns whether
        there was such a step."""
        row = self._first_row(
            "SELECT step FROM steps WHERE has_advantages = 0 ORDER BY step DESC LIMIT 1"
        )
        if row is None:
            return False

        step = row["step"]
        record = await self.record_of(step)
        advantages: dict[str, float] = {}
        with suppress(AgentEvoError):  # a record without a plan, or attempts that are gone
            if record is not None:
                stored = [
                    without_words(trajectory.trajectory)
                    async for trajectory in self._store.trajectories(trained_step=step)
                ]
                samples = await in_thread(step_samples, step, record.record, stored, rule)
                advantages = largest(samples)

        with self._writer.transaction():
            self._writer.put_advantages(step, advantages)

        return True

    async def move_some(self, folder: Path | None) -> bool:
        """Adds the log-prob changes of the newest committed step that lacks them. Returns whether
        there was such a step. `folder`: the run's folder, which may have them."""
        row = self._first_row(
            "SELECT step FROM steps WHERE has_moves = 0 ORDER BY step DESC LIMIT 1"
        )
        if row is None:
            return False

        step = row["step"]
        moves = {} if folder is None else await in_thread(largest_moves, folder / name_of(step))
        with self._writer.transaction():
            self._writer.put_moves(step, moves)
        return True

    async def _words_of(self, task_id: str) -> TaskWords:
        if task_id not in self._words:
            if len(self._words) > 10_000:
                self._words.clear()
            try:
                self._words[task_id] = task_words(await self._store.task(task_id))
            except StoreError:  # attempts whose task is not in the store
                self._words[task_id] = TaskWords()

        return self._words[task_id]

    def num_unread(self) -> int:
        row = self._first_row("SELECT count(*) FROM attempts WHERE NOT is_read AND alive")
        return int(row[0]) if row else 0

    def newest_written_at(self) -> float:
        """The time of the store's newest row, in Unix time."""
        row = self._first_row(
            "SELECT written_at FROM attempts WHERE alive ORDER BY seq DESC LIMIT 1"
        )
        return float(row[0]) if row else 0.0

    async def record_of(self, step: int) -> StepRecord | None:
        """The record of a committed step."""
        records = await self._store.steps(after=step - 1, limit=1)
        return records[0] if records and records[0].step == step else None

    def _first_row(self, query: str, values: tuple[Any, ...] = ()) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
        return row


def _runs(numbers: list[int], slack: int = 16) -> list[tuple[int, int]]:
    """Ranges that cover the sorted numbers. Numbers that are close to each other share a range."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][1] <= slack:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
