"""The results of a run's held-out attempts, read from the index: success at each evaluated step, by
kind and difficulty, and the changes between two steps.

A mean is over tasks, and a task's value is the mean over its completed attempts, as in `agentevo
eval` (runs/evaluation/summary.py). Failed attempts are counted separately.
runs/evaluation/estimates.py computes the intervals. The intervals are cached by their input values,
because a page is requested many times.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from agentevo.runs.evaluation.estimates import RESAMPLES, Estimate, mean_of, paired_difference
from agentevo_ui.index.columns import NONE
from agentevo_ui.index.reader import OpenIndex

MAX_DRAWS = 24_000_000
"""The maximum number of resampled values for a chart's intervals. With more tasks, the chart has
fewer steps."""
MAX_STEPS = 120
MAX_CHANGES = 200
"""The maximum number of tasks in each of the lists of better and of worse tasks."""
MAX_CACHED = 4_096
WORDS = ("decoding", "agent", "kind", "difficulty")


class HeldOut(NamedTuple):
    """Held-out attempts as columns [N], in the order of writing."""

    step: np.ndarray
    task_id: np.ndarray
    decoding: np.ndarray
    agent: np.ndarray
    kind: np.ndarray
    difficulty: np.ndarray
    success: np.ndarray
    reward: np.ndarray
    is_completed: np.ndarray
    seq: np.ndarray
    words: dict[str, list[str]]
    """Maps a column of words to the words that its numbers mean."""

    def part(self, where: np.ndarray) -> HeldOut:
        """The attempts for which `where` is true."""
        columns: dict[str, Any] = {
            name: column[where] for name, column in self._asdict().items() if name != "words"
        }
        return HeldOut(**columns, words=self.words)

    def count_words(self, name: str) -> dict[str, int]:
        """Maps a word of the column `name` to its number of attempts, the most frequent word
        first."""
        numbers, counts = np.unique(getattr(self, name), return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        counts_by_word = {self.word(name, number): count for number, count in pairs}
        return dict(sorted(counts_by_word.items(), key=lambda item: -item[1]))

    def word(self, name: str, number: int) -> str:
        """The word that a number in the column `name` means. Empty if it has none."""
        return self.words[name][number] if number != NONE else ""

    def of_word(self, name: str, word: str) -> HeldOut:
        """The attempts with `word` in the column `name`."""
        numbers = [i for i in range(NONE, len(self.words[name])) if self.word(name, i) == word]
        return self.part(np.isin(getattr(self, name), numbers))

    @property
    def steps(self) -> list[int]:
        """The evaluated steps."""
        return [int(step) for step in np.unique(self.step)]


class Account(NamedTuple):
    """The results of some attempts."""

    success: Estimate | None
    reward: Estimate | None
    num_attempts: int
    num_failed: int


class TaskChange(NamedTuple):
    """A task whose results differ between two steps: its success rates, and an attempt of each
    step."""

    task: str
    before: float
    after: float
    attempt_before: str
    attempt_after: str


class StepComparison(NamedTuple):
    """Two steps, compared on the tasks that both have completed."""

    difference: Estimate | None
    num_tasks: int
    better: list[TaskChange]
    num_better: int
    worse: list[TaskChange]
    num_worse: int


def held_out(index: OpenIndex) -> HeldOut:
    """All held-out attempts of a run."""
    where = np.flatnonzero(index.columns["alive"] & index.has_word("split", "eval"))
    names = ("step", "task_id", *WORDS, "success", "reward")
    return HeldOut(
        **{name: index.columns[name][where] for name in names},
        is_completed=index.has_word("status", "completed")[where],
        seq=where,
        words={name: index.words(name) for name in ("task_id", *WORDS)},
    )


def account(attempts: HeldOut) -> Account:
    """The mean success and reward over the tasks of some attempts."""
    done = attempts.part(attempts.is_completed)
    _, success = _mean_by_task(done, done.success)
    _, reward = _mean_by_task(done, done.reward)
    total = len(attempts.task_id)
    return Account(_estimate(success), _estimate(reward), total, total - len(done.task_id))


def by_part(attempts: HeldOut) -> list[tuple[str, str, Account]]:
    """(kind, difficulty, account) of each part, sorted by kind and difficulty."""
    accounts = []
    pairs = np.stack([attempts.kind, attempts.difficulty], axis=1)
    for kind, difficulty in np.unique(pairs, axis=0).tolist() if len(pairs) else []:
        is_in_part = (attempts.kind == kind) & (attempts.difficulty == difficulty)
        words = attempts.word("kind", kind), attempts.word("difficulty", difficulty)
        accounts.append((*words, account(attempts.part(is_in_part))))

    return sorted(accounts, key=lambda row: (row[0], _sort_key(row[1])))


def curve(attempts: HeldOut) -> list[tuple[int, Estimate]]:
    """Success at the evaluated steps. If there are too many steps, some of them at even distances,
    including the first and the last."""
    steps = attempts.steps
    tasks = len(np.unique(attempts.task_id)) or 1
    max_steps = int(min(max(MAX_DRAWS // (RESAMPLES * tasks), 8), MAX_STEPS))
    if len(steps) > max_steps:
        places = np.unique(np.linspace(0, len(steps) - 1, max_steps).round().astype(int))
        steps = [steps[place] for place in places.tolist()]

    points = []
    for step in steps:
        success = account_at(attempts, step).success
        if success is not None:
            points.append((step, success))

    return points


def account_at(attempts: HeldOut, step: int) -> Account:
    """The results of a step."""
    return account(attempts.part(attempts.step == step))


def changes(index: OpenIndex, attempts: HeldOut, first: int, last: int) -> StepComparison:
    """The tasks that are solved more often, and less often, at the last of two steps."""
    sides = []
    for step in (first, last):
        done = attempts.part((attempts.step == step) & attempts.is_completed)
        tasks, shares = _mean_by_task(done, done.success)
        # The first attempt at each task.
        _, places = np.unique(done.task_id, return_index=True)
        sides.append((tasks, shares, done.seq[places]))

    (tasks, before, seqs_before), (tasks_after, after, seqs_after) = sides
    shared_tasks, left, right = np.intersect1d(
        tasks, tasks_after, assume_unique=True, return_indices=True
    )
    before = before[left]
    after = after[right]
    gain = after - before
    order = np.argsort(-np.abs(gain), kind="stable")
    better = order[gain[order] > 0]
    worse = order[gain[order] < 0]
    shown = np.concatenate([better[:MAX_CHANGES], worse[:MAX_CHANGES]])
    ids = index.ids(np.concatenate([seqs_before[left[shown]], seqs_after[right[shown]]]).tolist())
    rows = {
        i: TaskChange(
            attempts.word("task_id", int(shared_tasks[i])),
            float(before[i]),
            float(after[i]),
            ids.get(int(seqs_before[left[i]]), ""),
            ids.get(int(seqs_after[right[i]]), ""),
        )
        for i in shown.tolist()
    }
    return StepComparison(
        _difference(before, after),
        len(shared_tasks),
        [rows[i] for i in better[:MAX_CHANGES].tolist()],
        len(better),
        [rows[i] for i in worse[:MAX_CHANGES].tolist()],
        len(worse),
    )


def _mean_by_task(done: HeldOut, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tasks in the order of their numbers, and the mean value of each."""
    tasks, places = np.unique(done.task_id, return_inverse=True)
    counts = np.bincount(places, minlength=len(tasks))
    sums = np.bincount(places, weights=values.astype(np.float64), minlength=len(tasks))
    return tasks, sums / np.maximum(counts, 1)


def _estimate(values: np.ndarray) -> Estimate | None:
    # The values are sorted, so that the same outcomes have the same interval in every run.
    return _cached_mean(np.sort(values).tobytes())


@lru_cache(maxsize=MAX_CACHED)
def _cached_mean(values: bytes) -> Estimate | None:
    return mean_of(np.frombuffer(values).tolist())


def _difference(before: np.ndarray, after: np.ndarray) -> Estimate | None:
    return _cached_difference(before.tobytes(), after.tobytes())


@lru_cache(maxsize=MAX_CACHED)
def _cached_difference(before: bytes, after: bytes) -> Estimate | None:
    return paired_difference(np.frombuffer(before).tolist(), np.frombuffer(after).tolist())


def _sort_key(word: str) -> tuple[int, float, str]:
    """A sort key: numbers in ascending order, then words."""
    try:
        return 0, float(word), ""
    except ValueError:
        return 1, 0.0, word


def first_of(counts: Mapping[str, int], requested: str, *, preferred: str = "") -> str:
    """The requested word if it exists, else the preferred word, else the most frequent one."""
    for word in (requested, preferred):
        if word in counts:
            return word
    return next(iter(counts), "")
