"""The results of a run's tasks, counted from the index in a few passes over its columns in memory,
for any number of attempts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agentevo.store.records import SPLITS, TRAJECTORY_STATES
from agentevo_ui.index.columns import NONE
from agentevo_ui.index.reader import OpenIndex
from agentevo_ui.index.selection import Selection

PAGE = 50
TIE_BREAK = 1e-9
"""The change of a task's sort key per completed attempt. It orders tasks with equal means."""
ORDERS = {
    "played": "most attempts",
    "hardest": "least success",
    "easiest": "most success",
    "worst": "lowest reward",
    "failing": "most failed attempts",
}


class TaskRow(NamedTuple):
    """A task and its attempts of a split."""

    id: str
    kind: str
    difficulty: str
    num_attempts: int
    num_failed: int
    """The number of attempts that failed or were cancelled. `success` and `reward` do not count
    them."""
    success: float | None
    """The share of the completed attempts that succeeded."""
    reward: float | None
    last_step: int
    """The step for which the task was last attempted."""


class TalliedTasks(NamedTuple):
    """A page of the list of tasks, and counts of all tasks in the list."""

    rows: list[TaskRow]
    total: int
    always: int
    """The number of tasks at which every completed attempt succeeds, among those with at least
    two."""
    never: int
    """The number of tasks at which no completed attempt succeeds, among those with at least two."""
    failing: int
    """The number of tasks without a completed attempt."""


def ledger(index: OpenIndex) -> list[tuple[str, list[tuple[str, int]]]]:
    """(split, [(state, number of attempts)]) of the splits with attempts."""
    splits: list[tuple[str, list[tuple[str, int]]]] = []
    for split in SPLITS:
        counts = dict(index.count_words(Selection(choices={"split": split}), "state"))
        if counts:
            splits.append((split, [(state, counts.get(state, 0)) for state in TRAJECTORY_STATES]))
    return splits


def tasks(
    index: OpenIndex, *, split: str, text: str = "", order: str = "played", page: int = 0
) -> TalliedTasks:
    """A page of the tasks with an attempt in `split` and with `text` in their id."""
    table = index.columns
    names = index.words("task_id")
    chosen = table["alive"] & index.has_word("split", split)
    done = chosen & index.has_word("status", "completed")
    task = table["task_id"]
    size = len(names)
    attempts = np.bincount(task[chosen], minlength=size)
    completed = np.bincount(task[done], minlength=size)
    wins = np.bincount(task[done & table["success"]], minlength=size)
    rewards = np.bincount(task[done], weights=table["reward"][done], minlength=size)

    is_selected = attempts > 0
    if text:
        is_selected &= np.array([text.lower() in name.lower() for name in names], dtype=bool)

    with np.errstate(invalid="ignore", divide="ignore"):
        share = wins / completed
        mean = rewards / completed

    has_several = is_selected & (completed > 1)
    keys = _sort_keys(order, attempts, completed, share, mean)
    task_numbers = np.flatnonzero(is_selected)
    shown = _page(task_numbers, keys[task_numbers], page)

    return TalliedTasks(
        _rows(index, chosen, shown, attempts, completed, share, mean),
        len(task_numbers),
        int(np.count_nonzero(has_several & (wins == completed))),
        int(np.count_nonzero(has_several & (wins == 0))),
        int(np.count_nonzero(is_selected & (completed == 0))),
    )


def _sort_keys(
    order: str, attempts: np.ndarray, completed: np.ndarray, share: np.ndarray, mean: np.ndarray
) -> np.ndarray:
    """The sort keys: the smallest comes first. Among equal keys, the task with more completed
    attempts comes first. In an order by a mean, a task without a completed attempt comes last."""
    if order == "failing":
        return completed.astype(np.float64) - attempts
    if order == "played":
        return -attempts.astype(np.float64)
    values = {"hardest": share, "easiest": -share, "worst": mean}[order]
    values = values - TIE_BREAK * completed
    return np.where(np.isnan(values), np.inf, values)


def _page(task_numbers: np.ndarray, keys: np.ndarray, page: int) -> np.ndarray:
    """The task numbers of a page. Tasks with equal keys are in the order of their numbers."""
    end = (page + 1) * PAGE
    if len(task_numbers) > end:  # avoids sorting a million tasks for the first fifty
        may_be_shown = keys <= np.partition(keys, end)[end]
        task_numbers = task_numbers[may_be_shown]
        keys = keys[may_be_shown]
    order = np.argsort(keys, kind="stable")
    return task_numbers[order][page * PAGE : end]


def _rows(
    index: OpenIndex,
    chosen: np.ndarray,
    shown: np.ndarray,
    attempts: np.ndarray,
    completed: np.ndarray,
    share: np.ndarray,
    mean: np.ndarray,
) -> list[TaskRow]:
    table = index.columns
    names = index.words("task_id")
    is_shown = np.zeros(len(attempts), dtype=bool)
    is_shown[shown] = True
    row_places = np.flatnonzero(chosen & is_shown[table["task_id"]])
    task = table["task_id"][row_places]
    last = np.zeros(len(attempts), dtype=np.int64)
    np.maximum.at(last, task, table["step"][row_places])

    words = {}
    for name in ("kind", "difficulty"):
        numbers = table[name][row_places]
        has_word = numbers != NONE  # an attempt whose turns are not read yet has none
        word_of = index.words(name)
        words[name] = {
            int(number): word_of[word]
            for number, word in zip(task[has_word], numbers[has_word], strict=True)
        }

    return [
        TaskRow(
            names[number],
            words["kind"].get(number, ""),
            words["difficulty"].get(number, ""),
            int(attempts[number]),
            int(attempts[number] - completed[number]),
            float(share[number]) if completed[number] else None,
            float(mean[number]) if completed[number] else None,
            int(last[number]),
        )
        for number in shown.tolist()
    ]
