"""The values in a list of attempts that are computed from the turns, not from the store's
columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from agentevo.rollout.task_stages import value_of
from agentevo.types import REWARD_PARTS, Message, Task, Trajectory
from agentevo_ui.index.database import TEXT_CHARS


class Derived(NamedTuple):
    """The numbers of an attempt. None if the turns do not have them."""

    lowest_logprob: float | None
    """The log-prob of the least likely sampled token. Greedy turns have none."""
    lowest_version: int | None
    """The oldest version of the weights that sampled one of the tokens."""
    text: str
    """The texts, as `said` shortens them."""


def derive(trajectory: Trajectory) -> Derived:
    """Computes the values in one pass over the turns."""
    logprobs_of_turns = [
        np.asarray(turn.logprobs, dtype=np.float32)
        for turn in trajectory.turns
        if turn.temperature > 0 and len(turn.logprobs)
    ]
    logprobs = (
        np.concatenate(logprobs_of_turns) if logprobs_of_turns else np.zeros(0, dtype=np.float32)
    )
    logprobs = logprobs[np.isfinite(logprobs)]
    versions = [min(turn.versions) for turn in trajectory.turns if len(turn.versions)]

    return Derived(
        lowest_logprob=float(logprobs.min()) if len(logprobs) else None,
        lowest_version=min(versions, default=None),
        text=said(trajectory),
    )


def said(trajectory: Trajectory) -> str:
    """The texts of an attempt in their order, one message a line, shortened to TEXT_CHARS: the
    error, prompts and replies, tool calls, and replies of remote models."""
    first = TEXT_CHARS * 3 // 4
    last = TEXT_CHARS // 4
    head = ""
    tail = ""
    size = 0
    for piece in _pieces(trajectory):
        size += len(piece) + 1
        if len(head) < first:
            taken = first - len(head)
            head += piece[:taken] + "\n"
            piece = piece[taken:]
        if piece:
            tail = (tail + piece[-last:] + "\n")[-last:]

    return head if not tail else f"{head}\n…\n{tail}"


def _pieces(trajectory: Trajectory) -> Iterator[str]:
    if trajectory.error:
        yield trajectory.error

    turns: Iterable[tuple[list[Message]]] = ((turn.messages,) for turn in trajectory.turns)
    remote: Iterable[tuple[list[Message]]] = ((turn.messages,) for turn in trajectory.remote_turns)
    for (messages,) in chain(turns, remote):
        for message in messages:
            if message.reasoning:
                yield message.reasoning
            if message.text:
                yield message.text
            for call in message.tool_calls:
                yield f"{call.name} {call.arguments}"


class TaskWords(NamedTuple):
    """The words under which a task is counted. Empty if it has none."""

    kind: str = ""
    difficulty: str = ""


def task_words(task: Task) -> TaskWords:
    """Kind and difficulty of a task."""
    return TaskWords(_kind(task), _difficulty(task))


def _difficulty(task: Task) -> str:
    """The task's own word or number for its difficulty. Numbers have two digits, so that many tasks
    share one."""
    for key in ("difficulty", "level"):
        value = value_of(task, key)
        if isinstance(value, str) and value:
            return value[:100]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f"{value:.2g}" if isinstance(value, float) else str(value)[:100]
    return ""


def _kind(task: Task) -> str:
    """The kind of a task: its own word for it, else its environment."""
    for key in ("kind", "category", "type", "subject"):
        word = task.metadata.get(key)
        if isinstance(word, str) and word:
            return word[:100]
    return task.environment or task.scorer or "question"


def judge_gap(
    metrics: Mapping[str, float], weights: Mapping[str, tuple[float, bool]]
) -> float | None:
    """The gap between judges and rules: |mean of the judges' scores - mean of the rules'|. It is
    from 0 to 1 if both scores are. None if either has no score.

    `weights`: maps the name of a reward to its weight in the sum, and to whether a remote model
    judges. A part is the score times its weight."""
    scores: dict[bool, list[float]] = {True: [], False: []}
    for name, (weight, is_judge) in weights.items():
        part = metrics.get(f"{REWARD_PARTS}{name}")
        if part is not None and weight:
            scores[is_judge].append(part / weight)

    if not scores[True] or not scores[False]:
        return None

    judges, rules = (sum(of) / len(of) for of in (scores[True], scores[False]))
    return abs(judges - rules)
