"""The data that calibrates a judge: groups of attempts of known quality.

A file of rows (JSON lines), one for each attempt:

    task_id     attempts at one task are a group (or `group`, if that differs)
    messages    the conversation in OpenAI's form, also with images (data URLs, or paths relative
                to the file); or `query` and `reply`
    truth       what it is worth, any number; or `label`, right or wrong
    answer      the task's own answer, for judges that are shown one; optional
    tools       schemas in OpenAI's form; optional

`agentevo trajectories export RUN OUT --annotations judge` writes such a file from human
annotations. The other source is a run's store. The truth is then the rewards, or a part of them, by
name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentevo.data.message_images import ImageCollector
from agentevo.data.messages import messages_of
from agentevo.data.rows import SourceRow, read_json_lines
from agentevo.errors import AgentEvoError, BadRequestError, ConfigError
from agentevo.store.store import Store
from agentevo.types import REWARD_PARTS, Message, Task, Trajectory, Turn
from agentevo.types.equality import are_equal
from agentevo.types.images import ImageFile, images_of_trajectory

MAX_ROWS = 100_000


@dataclass(frozen=True)
class KnownGroup:
    """Attempts at a task, and the truth of each."""

    task: Task
    attempts: Sequence[Trajectory]
    truths: Sequence[float]
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    """Maps a digest to the image, for those that the attempts name."""

    @property
    def differs(self) -> bool:
        return not are_equal(self.truths)


def read_rows(path: Path) -> list[KnownGroup]:
    """The groups of a file. Raises ConfigError with the line that can't be read."""
    images = ImageCollector(folder=path.parent)
    rows_by_group: dict[str, list[tuple[Mapping[str, Any], Trajectory, float]]] = {}
    for number, line in enumerate(_lines(path), 1):
        if number > MAX_ROWS:
            raise ConfigError(f"--rows {path}: more than {MAX_ROWS} rows: give a part of them")

        try:
            row = line.value
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
            name = str(row.get("group") or row.get("task_id") or "rows")
            group = rows_by_group.setdefault(name, [])
            group.append((row, _attempt(row, name, f"row-{number}", images), _truth(row)))
        except (ValueError, BadRequestError) as error:
            raise ConfigError(
                f"--rows {line.where}: {error}: a row has messages (or query and reply), "
                "truth (or label), and task_id"
            ) from error

    groups = []
    for name, rows in rows_by_group.items():
        first, attempt, _ = rows[0]
        query = first.get("query") or next(
            (message.text for message in attempt.turns[0].messages if message.role == "user"), ""
        )
        task = Task(id=name, query=str(query), answer=first.get("answer"))
        groups.append(
            KnownGroup(
                task,
                [trajectory for _, trajectory, _ in rows],
                [t for *_, t in rows],
                images.files,
            )
        )

    return groups


def _lines(path: Path) -> Iterator[SourceRow]:
    try:
        yield from read_json_lines(path)
    except ConfigError as error:
        raise ConfigError(f"--rows {error}") from error


def _truth(row: Mapping[str, Any]) -> float:
    label = row.get("truth", row.get("label"))
    if isinstance(label, str) and label in ("right", "wrong"):
        return float(label == "right")
    if not isinstance(label, bool | int | float) or not math.isfinite(label):
        raise ValueError("it has neither a number `truth` nor a `label` that is right or wrong")
    return float(label)


def _attempt(row: Mapping[str, Any], group: str, name: str, images: ImageCollector) -> Trajectory:
    messages = row.get("messages")
    if messages is None and isinstance(row.get("reply"), str):
        messages = [
            {"role": "user", "content": str(row.get("query") or "")},
            {"role": "assistant", "content": row["reply"]},
        ]

    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no list `messages`, and no `reply`")

    plain = [
        {k: v for k, v in m.items() if k != "weight"} if isinstance(m, dict) else m
        for m in messages
    ]
    tools = json.dumps(row["tools"]) if row.get("tools") else ""
    turn = _turn(messages_of(plain, images), tools)
    return Trajectory(id=name, task_id=group, group_id=f"{group}/calibrate", turns=[turn])


def _turn(messages: list[Message], tools: str) -> Turn:
    return Turn(
        index=0,
        prompt_ids=[],
        completion_ids=[],
        logprobs=[],
        versions=[],
        finish_reason="stop",
        messages=messages,
        tools=tools,
    )


async def groups_of_store(
    store: Store, truth: str, limit: int, *, with_images: bool = False
) -> list[KnownGroup]:
    """The groups of a run's training attempts with different truths, the newest first, at most
    `limit`. `truth`: `reward`, `success`, a metric, or a part of the reward by its name.
    `with_images`: reads their images too. Raises ConfigError if no attempt has the truth."""
    summaries = await store.summaries(split="train")
    by_group: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.status == "completed":
            by_group.setdefault(summary.group_id, []).append(summary.id)

    groups: list[KnownGroup] = []
    for ids in reversed(by_group.values()):
        attempts = [await store.trajectory(name) for name in ids]
        truths = [_truth_of(attempt, truth) for attempt in attempts]
        task = await _task_of(store, attempts[0].task_id)
        group = KnownGroup(task, attempts, truths)
        if group.differs:
            named = dict.fromkeys(n for a in attempts for n in images_of_trajectory(a))
            images = {name: await store.image(name) for name in named if with_images}
            groups.append(replace(group, images=images))
        if len(groups) == limit:
            break

    return groups


async def _task_of(store: Store, name: str) -> Task:
    try:
        return await store.task(name)
    except AgentEvoError:  # the tasks of an environment are generated, and in no store
        return Task(id=name)


def _truth_of(trajectory: Trajectory, truth: str) -> float:
    if truth in ("reward", "success"):
        return float(getattr(trajectory, truth))

    truths = {**trajectory.metrics, **trajectory.reward_parts}
    name = truth.removeprefix(REWARD_PARTS)
    if name not in truths:
        raise ConfigError(
            f"--truth {truth}: the attempt {trajectory.id} has no such number: it has reward, "
            f"success, {', '.join(sorted(truths)) or 'nothing else'}"
        )

    return truths[name]
