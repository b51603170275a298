"""Annotations and pairs of attempts as training data: rows for `agentevo sft`, pairs and labelled
answers for `data.pairs` of `agentevo train`, and data to calibrate a judge.

    sft     attempts that are right, as `agentevo trajectories export --sft` writes them, and edited
            last replies, with only that reply trained unless the attempt is right
    pairs   better against worse from where two conversations part, edited against original reply
    labels  attempts that are right or wrong as {"prompt", "completion", "label"}, for kto and rft
    judge   each verdict with the reward, its parts and the conversation

A file of pairs can't represent tools, so attempts with tools are left out of pairs and labels.
Attempts at held-out tasks become verdicts for a judge. They become rows to train on only with
--held-out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentevo.data import RowError, RowReport
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runs.folder.annotations import RIGHT, Annotation, Annotations, last_answer
from agentevo.runs.folder.sft_export import ReadAnswer, conversations_of, with_images
from agentevo.store.export import atomic_file
from agentevo.store.records import TrajectorySummary
from agentevo.store.store import Store
from agentevo.types import RemoteTurn, Trajectory

Format = Literal["sft", "pairs", "labels", "judge"]
FORMATS: tuple[Format, ...] = ("sft", "pairs", "labels", "judge")
Row = dict[str, Any]
GONE = "the attempt is not in the store"
SILENT = "it has no reply"
TOOLS = "it has tools, which a file of pairs can't hold"
SAME = "both replies are the same"
OTHER_TASK = "the two conversations differ before the first answer"
HELD_OUT = "it is at a held-out task (--held-out includes it)"
NOT_WHOLE = "the last reply was cut off by the token limit"


class LeftOutError(Exception):
    """An annotation gives no row. The message is the reason."""


async def export_annotations(
    store: Store,
    annotations: Annotations,
    path: Path,
    form: Format,
    read: ReadAnswer,
    *,
    held_out: bool = False,
) -> tuple[int, Counter[str]]:
    """Writes the rows to `path` (.jsonl or .jsonl.gz). Returns the number of rows, and a map from a
    reason to the number of annotations that gave no row for it. `held_out`: whether attempts of
    evaluations are trained on too. Raises ConfigError if there is no row. Then nothing is
    written."""
    attempt_ids = set(annotations.attempts) | {name for pair in annotations.pairs for name in pair}
    attempts: dict[str, Trajectory] = {}
    for name in attempt_ids:
        try:
            attempts[name] = await store.trajectory(name)
        except AgentEvoError:
            continue  # reported as GONE, once for each annotation

    evaluated: set[str] = set()
    if form != "judge" and not held_out:
        tasks = {trajectory.task_id for trajectory in attempts.values()}
        for task in tasks:
            evaluated |= {
                summary.id for summary in await store.summaries(task_id=task, split="eval")
            }

    count = 0
    left_out = Counter[str]()
    with atomic_file(path) as file:
        for row in _rows(annotations, attempts, evaluated, form, read):
            if isinstance(row, LeftOutError):
                left_out[str(row)] += 1
                continue
            line = json.dumps(await with_images(row, store), ensure_ascii=False)
            file.write(line.encode("utf-8", "replace") + b"\n")
            count += 1

        if not count:
            reasons = "; ".join(f"{number} left out: {why}" for why, number in left_out.items())
            raise ConfigError(
                f"no annotation gives a row of the format {form}: "
                f"{reasons or 'no attempt is annotated (agentevo annotate)'}"
            )

    return count, left_out


def _rows(
    annotations: Annotations,
    attempts: dict[str, Trajectory],
    held_out: Set[str],
    form: Format,
    read: ReadAnswer,
) -> Iterator[Row | LeftOutError]:
    for attempt in annotations.attempts.values():
        try:
            trajectory = attempts.get(attempt.attempt)
            if trajectory is None:
                raise LeftOutError(GONE)
            if attempt.attempt in held_out:
                raise LeftOutError(HELD_OUT)

            if form == "sft":
                yield from _sft_rows(attempt, trajectory, read)
            elif form == "pairs" and attempt.reply is not None:
                original = conversation(trajectory, read)
                edited = conversation(_with_reply(trajectory, attempt.reply), read)
                yield {**pair_of(edited, original), "trajectory_id": attempt.attempt}
            elif form == "labels" and attempt.verdict:
                yield _label_row(attempt, trajectory, read)
            elif form == "judge" and attempt.verdict:
                yield _judge_row(attempt, trajectory, read)
        except LeftOutError as error:
            yield error

    for preference in annotations.pairs.values() if form == "pairs" else ():
        try:
            if preference.better not in attempts or preference.worse not in attempts:
                raise LeftOutError(GONE)
            if preference.better in held_out or preference.worse in held_out:
                raise LeftOutError(HELD_OUT)
            sides = [
                conversation(attempts[name], read) for name in (preference.better, preference.worse)
            ]
            yield {**pair_of(*sides), "better": preference.better, "worse": preference.worse}
        except LeftOutError as error:
            yield error


def _with_reply(trajectory: Trajectory, reply: str) -> Trajectory:
    """The trajectory with another last reply, which counts as complete."""
    last = last_answer(trajectory)
    if last is None or not last.messages:
        raise LeftOutError(SILENT)

    message = msgspec.structs.replace(
        last.messages[-1], content=reply, tool_calls=(), reasoning=None
    )
    messages = [*last.messages[:-1], message]
    turn = msgspec.structs.replace(last, messages=messages, finish_reason="stop")
    if isinstance(turn, RemoteTurn):
        turns = [*trajectory.remote_turns[:-1], turn]
        return msgspec.structs.replace(trajectory, remote_turns=turns)

    return msgspec.structs.replace(trajectory, turns=[*trajectory.turns[:-1], turn])


def _sft_rows(annotation: Annotation, trajectory: Trajectory, read: ReadAnswer) -> Iterator[Row]:
    if annotation.reply is None and annotation.verdict != RIGHT:
        return
    if annotation.reply is not None:
        trajectory = _with_reply(trajectory, annotation.reply)

    rows = list(conversations_of(trajectory, read))
    if not rows:
        raise LeftOutError(SILENT)

    if annotation.verdict != RIGHT:  # its other replies were not judged, so they are context
        row = rows[-1]
        *before, last = row["messages"]
        context = [m | {"weight": 0} if m["role"] == "assistant" else m for m in before]
        rows = [row | {"messages": [*context, last]}]

    for row in rows:
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        if all(answer.get("weight") == 0 for answer in answers):
            raise LeftOutError(NOT_WHOLE)
        yield {**row, "task_id": trajectory.task_id, "trajectory_id": trajectory.id}


def conversation(trajectory: Trajectory, read: ReadAnswer, *, tools: bool = False) -> list[Row]:
    """The messages up to the last answer."""
    rows = list(conversations_of(trajectory, read))
    if not rows:
        raise LeftOutError(SILENT)
    if "tools" in rows[-1] and not tools:
        raise LeftOutError(TOOLS)
    return [{k: v for k, v in m.items() if k != "weight"} for m in rows[-1]["messages"]]


def _first_answer(messages: Sequence[Row]) -> int:
    return next(i for i, message in enumerate(messages) if message["role"] == "assistant")


def pair_of(chosen: list[Row], rejected: list[Row]) -> Row:
    """The messages from the first one in which two conversations differ. If that message is not the
    assistant's, from the reply before it."""
    if chosen == rejected:
        raise LeftOutError(SAME)

    place = 0
    while place < min(len(chosen), len(rejected)) and chosen[place] == rejected[place]:
        place += 1

    while place >= 0 and not all(
        place < len(side) and side[place]["role"] == "assistant" for side in (chosen, rejected)
    ):
        place -= 1

    if place < 1:
        raise LeftOutError(OTHER_TASK)

    return {"prompt": chosen[:place], "chosen": chosen[place:], "rejected": rejected[place:]}


def _label_row(annotation: Annotation, trajectory: Trajectory, read: ReadAnswer) -> Row:
    messages = conversation(trajectory, read)
    first = _first_answer(messages)
    if first == 0:
        raise LeftOutError(OTHER_TASK)

    return {
        "prompt": messages[:first],
        "completion": messages[first:],
        "label": annotation.verdict == RIGHT,
        "trajectory_id": annotation.attempt,
    }


def _judge_row(annotation: Annotation, trajectory: Trajectory, read: ReadAnswer) -> Row:
    return {
        "trajectory_id": annotation.attempt,
        "task_id": trajectory.task_id,
        "messages": conversation(trajectory, read, tools=True),
        "label": annotation.verdict == RIGHT,
        "note": annotation.note,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "reward_parts": trajectory.reward_parts,
        "who": annotation.who,
        "at": annotation.at,
    }


async def export_pairs(
    store: Store, path: Path, read: ReadAnswer, *, margin: float = 0.0, per_group: int = 1
) -> RowReport:
    """Writes pairs of a run's training attempts at the same task, for `agentevo sft --reward-model`
    and `data.pairs`: the best attempt of a group with the worst, the second best with the second
    worst, and so on, at most `per_group` of a group, whose rewards differ by more than `margin`. A
    pair has messages and no tokens, because a reward model has its own tokenizer. Returns the
    account of all pairs. Raises ConfigError if there is no pair. Then nothing is written."""
    report = RowReport("export")
    groups: dict[str, list[TrajectorySummary]] = {}
    for summary in await store.summaries(split="train"):
        if summary.status == "completed":
            groups.setdefault(summary.group_id, []).append(summary)

    with atomic_file(path) as file:
        for name, members in groups.items():
            members.sort(key=lambda member: (-member.reward, member.id))
            for index in range(min(per_group, len(members) // 2)):
                better = members[index]
                worse = members[-1 - index]
                report.rows += 1
                try:
                    row = await _pair_row(store, better, worse, margin, read)
                except RowError as error:
                    report.add(f"{name}, pair {index + 1}", error)
                    continue

                line = json.dumps(await with_images(row, store), ensure_ascii=False)
                file.write(line.encode("utf-8", "replace") + b"\n")

        if not report.used:
            what = report.lines() or ["no group has two training attempts"]
            raise ConfigError("\n".join(["no pair was written:", *what]))

    return report


async def _pair_row(
    store: Store,
    better: TrajectorySummary,
    worse: TrajectorySummary,
    margin: float,
    read: ReadAnswer,
) -> dict[str, object]:
    """Raises RowError."""
    difference = better.reward - worse.reward
    if not difference > margin:
        raise RowError("alike", f"the rewards differ by {difference:g}, not more than {margin:g}")

    try:
        sides = [
            conversation(await store.trajectory(summary.id), read) for summary in (better, worse)
        ]
        pair = pair_of(*sides)
    except LeftOutError as error:
        raise RowError("alike", str(error)) from error

    about = {"task_id": better.task_id, "better": better.id, "worse": worse.id}
    return {**pair, **about, "rewards": [better.reward, worse.reward]}
