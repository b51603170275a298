"""Exports the messages of a run's attempts as conversations for `agentevo sft`. The trained answers
are those of a teacher behind an API, or of the policy itself, for example for a smaller model.

A row is a path from the beginning of a conversation to its last answer, in the form `messages`.
Recorded answers are trained. Answers that another author put into the history, and answers that the
token limit cut off, are context (`weight: 0`). `agentevo sft` can read every exported row, because
the export leaves out rows that `agentevo sft` would refuse. Rows name their images by digest until
they are written, and have them as data URLs in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from agentevo.data import RowError, RowReport
from agentevo.data.conversation import check_text, conversation_of
from agentevo.data.message_images import part_with_data
from agentevo.errors import ConfigError
from agentevo.store.export import atomic_file
from agentevo.store.records import Split, TrajectorySummary
from agentevo.store.store import Store
from agentevo.types import Message, RemoteTurn, Trajectory, Turn
from agentevo.types.images import images_of_trajectory

if TYPE_CHECKING:
    from agentevo.models.chat.chat_format import ChatFormat  # importing it loads torch

POLICY = "policy"
"""The value of `model` that means the policy."""
_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
"""The keys of rows that have messages."""
ReadAnswer = Callable[[Turn, str], dict[str, Any]]
"""Converts an answer of the policy, with the tools as JSON, to a message."""


def answer_reader(chat: ChatFormat | None) -> ReadAnswer:
    """A function that converts the policy's answers to messages. It separates thoughts and tool
    calls from the text, in the notation of the model's family. Without a chat format, the text
    stays unchanged."""

    def read(turn: Turn, tools: str) -> dict[str, Any]:
        text = turn.messages[-1].text
        opening = "" if chat is None else chat.opening_of(turn.prompt_ids)
        if chat is None or not (tools or opening):
            return {"role": "assistant", "content": text}

        schemas = json.loads(tools) if tools else None
        parsed = chat.parser.parse(text, opening=opening, tools=schemas, calls=bool(tools))
        content = parsed.content + "".join(call.text for call in parsed.malformed)
        message = Message("assistant", content, parsed.tool_calls, reasoning=parsed.reasoning)
        return as_row(message) | ({"weight": 0} if parsed.malformed else {})

    return read


def as_row(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form, with its reasoning. Its images are parts by digest."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [to_builtins(part) for part in content]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]

    for key, value in (
        ("tool_call_id", message.tool_call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    ):
        if value is not None:
            fields[key] = value

    return fields


async def with_images(row: Mapping[str, Any], store: Store) -> dict[str, Any]:
    """A row of messages with the images of the store in place of their digests. Raises
    UnusableStoreError for an image that the store does not have."""

    async def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [await shown(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "image" and "sha256" in value:
            return part_with_data(await store.image(value["sha256"]))
        return value | ({"content": await shown(value["content"])} if "content" in value else {})

    return {key: await shown(value) if key in _MESSAGES else value for key, value in row.items()}


def conversations_of(
    trajectory: Trajectory, read: ReadAnswer, model: str | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of an attempt, each with `messages` and `tools`. `model`: POLICY or the name of a
    remote model. None means all remote models if the attempt used any, else the policy."""
    turns: Sequence[Turn | RemoteTurn] = trajectory.turns
    if model != POLICY and (model is not None or trajectory.remote_turns):
        turns = trajectory.remote_turns

    parents = {turn.parent for turn in turns}
    for leaf in turns:
        if leaf.index in parents or model not in (None, POLICY, _model_of(leaf)):
            continue

        path: list[Turn | RemoteTurn] = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(turns[parent])

        tools = path[-1].tools
        messages: list[dict[str, Any]] = []
        for turn in reversed(path):
            context_rows = map(as_row, turn.messages[:-1])
            messages += [_untrained(m) if m["role"] == "assistant" else m for m in context_rows]
            last = turn.messages[-1]
            reply_row = read(turn, tools) if isinstance(turn, Turn) else as_row(last)
            messages.append(_untrained(reply_row) if turn.finish_reason == "length" else reply_row)

        yield {
            "messages": messages,
            **({"tools": json.loads(tools)} if tools else {}),
            "model": _model_of(leaf),
        }


def _model_of(turn: Turn | RemoteTurn) -> str:
    return turn.model if isinstance(turn, RemoteTurn) else POLICY


def _untrained(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"weight": 0}


async def export_sft(
    store: Store,
    path: Path,
    read: ReadAnswer,
    *,
    split: Split = "train",
    min_reward: float | None = None,
    per_task: int | None = None,
    model: str | None = None,
) -> RowReport:
    """Writes the conversations of the attempts that succeeded, or have at least `min_reward`, to
    `path` (.jsonl or .jsonl.gz). Each task has at most `per_task` attempts, the best first. Returns
    a report on all attempts. Duplicates are left out. Raises ConfigError if there is nothing to
    export."""
    summaries = await store.summaries(split=split)
    if not summaries:
        raise ConfigError(await _no_attempt_message(store, split))

    async def attempts() -> AsyncIterator[tuple[Trajectory, bool]]:
        async for stored in store.trajectories(split=split, status="completed"):
            yield stored.trajectory, stored.tokens_deleted

    return await _export(summaries, attempts, path, read, min_reward, per_task, model, store)


async def export_played(
    trajectories: Sequence[Trajectory],
    path: Path,
    read: ReadAnswer,
    *,
    min_reward: float | None = None,
    per_task: int | None = None,
    model: str | None = None,
) -> RowReport:
    """Does the same as `export_sft` for the attempts of an evaluation's folder. Raises ConfigError
    if there is nothing to export, and for attempts with images, which only a store keeps."""
    if any(images_of_trajectory(trajectory) for trajectory in trajectories):
        raise ConfigError(
            "the attempts have images, and the folder of an evaluation has only their digests: "
            "play them in a run (agentevo train RECIPE trainer.steps=0 evaluation.tasks=N), and "
            "export its attempts with --split eval"
        )

    async def attempts() -> AsyncIterator[tuple[Trajectory, bool]]:
        for trajectory in trajectories:
            yield trajectory, False

    return await _export(trajectories, attempts, path, read, min_reward, per_task, model, None)


async def _export(
    summaries: Sequence[TrajectorySummary | Trajectory],
    attempts: Callable[[], AsyncIterator[tuple[Trajectory, bool]]],
    path: Path,
    read: ReadAnswer,
    min_reward: float | None,
    per_task: int | None,
    model: str | None,
    store: Store | None,
) -> RowReport:
    """`attempts`: reads all attempts, each with whether its tokens were deleted. `store`: has their
    images; None if they have none."""
    report = RowReport("export")
    good = _select_good(summaries, report, min_reward)
    if per_task is not None:
        digests_by_attempt = {
            trajectory.id: _digests_to_train(trajectory, read, model)
            async for trajectory, _ in attempts()
            if trajectory.id in good
        }
        good = _select_best(good, digests_by_attempt, per_task, report)

    known: set[str] = set()
    with atomic_file(path) as file:
        async for trajectory, tokens_deleted in attempts():
            if trajectory.id not in good:
                continue

            rows = list(conversations_of(trajectory, read, model))
            report.rows += max(len(rows), 1)
            for row in rows:
                try:
                    line = _with_origin(row, trajectory, known)
                except RowError as error:
                    report.add(trajectory.id, error)
                else:
                    line = line if store is None else await with_images(line, store)
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

            if not rows:
                author = f"the model {model}" if model else "a model"
                reason = "its tokens were deleted" if tokens_deleted else f"{author} said nothing"
                report.add(trajectory.id, RowError("empty", f"{reason} in this attempt"))

        if not report.used:
            raise ConfigError("\n".join(["nothing was written:", *report.lines()]))

    return report


def _select_good(
    summaries: Sequence[TrajectorySummary | Trajectory],
    report: RowReport,
    min_reward: float | None,
) -> dict[str, str]:
    """Maps the attempts that are good enough to their tasks. The best come first, and of equally
    good attempts the shortest."""
    good: dict[str, str] = {}
    for summary in sorted(summaries, key=lambda s: (-s.reward, _length(s), s.id)):
        error: RowError | None = None
        if summary.status != "completed":
            error = RowError("attempt_failed", summary.error or summary.status)
        elif min_reward is None and not summary.success:
            error = RowError("low_reward", f"no success (reward {summary.reward:g})")
        elif min_reward is not None and summary.reward < min_reward:
            error = RowError("low_reward", f"reward {summary.reward:g} is below {min_reward:g}")

        if error is None:
            good[summary.id] = summary.task_id
        else:
            report.rows += 1
            report.add(summary.id, error)

    return good


def _digests_to_train(trajectory: Trajectory, read: ReadAnswer, model: str | None) -> set[bytes]:
    """Digests of an attempt's rows that can be trained on."""
    digests = set()
    for row in conversations_of(trajectory, read, model):
        with suppress(RowError):
            digests.add(hashlib.sha256(_content(row, trajectory.id).encode()).digest())
    return digests


def _select_best(
    good: Mapping[str, str],
    digests_by_attempt: Mapping[str, set[bytes]],
    per_task: int,
    report: RowReport,
) -> dict[str, str]:
    """The first attempts of each task, until `per_task` of them have new content. Attempts without
    new content are skipped and do not count."""
    chosen: dict[str, str] = {}
    num_by_task: Counter[str] = Counter()
    seen_digests: set[bytes] = set()
    for name, task in good.items():
        if num_by_task[task] == per_task:
            report.rows += 1
            error = RowError("beyond_per_task", f"{per_task} of {task} are exported already")
            report.add(name, error)
            continue

        chosen[name] = task
        new = digests_by_attempt.get(name, set()) - seen_digests
        num_by_task[task] += bool(new)
        seen_digests |= new

    return chosen


def _length(attempt: TrajectorySummary | Trajectory) -> int:
    """The length of the replies in tokens, or in turns for a remote model, whose tokens are
    unknown."""
    if isinstance(attempt, Trajectory):
        return attempt.num_completion_tokens() or len(attempt.remote_turns)
    return attempt.num_completion_tokens


def _content(row: Mapping[str, Any], name: str) -> str:
    """A row as JSON. Raises RowError for a row that can't be trained on."""
    check_text(row)
    conversation = conversation_of(name, row)
    answers = [m for m in conversation.messages if m["role"] == "assistant"]
    if all(answer.get("weight") == 0 for answer in answers):
        raise RowError("cut_off", "every answer was cut off by the token limit, or is malformed")
    return json.dumps(row, ensure_ascii=False)


def _with_origin(
    row: Mapping[str, Any], trajectory: Trajectory, seen_contents: set[str]
) -> dict[str, Any]:
    """A row of the file, without the bytes of its images. Raises RowError for a row that can't be
    trained on, or is already in the file."""
    content = _content(row, trajectory.id)
    if content in seen_contents:
        raise RowError("duplicate", "an earlier attempt has the same reply")

    seen_contents.add(content)
    origin = {
        "task_id": trajectory.task_id,
        "trajectory_id": trajectory.id,
        "reward": trajectory.reward,
    }
    return {**row, **origin}


async def _no_attempt_message(store: Store, split: Split) -> str:
    counts: Counter[str] = Counter(summary.split for summary in await store.summaries())
    contents = ", ".join(f"{count} of the split {name}" for name, count in sorted(counts.items()))
    remedy = f"it has {contents}: choose one with --split" if contents else "it has no attempt yet"
    return f"the store has no attempt of the split {split}: {remedy}"
