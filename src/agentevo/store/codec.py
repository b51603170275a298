"""Converts records to rows and back, exactly: `decode(encode(x)) == x`, with log-probs rounded to
float32. tables.py and blobs.py describe the formats.

The digest of a row covers its whole content except the timings. The store can thus distinguish
equal content from a clash of ids without reading the turns. Before a transaction starts, the codec
refuses content that could not be read back unchanged.

A row is a mapping from column to value, the same for every backend: a SQL row's `_mapping`, or a
MongoDB document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from typing import Any, TypeVar, cast, get_args

import msgspec

from agentevo.errors import StoreError
from agentevo.store.blobs import (
    pack_turns,
    to_bytes,
    unpack_extras,
    unpack_turns,
)
from agentevo.store.damage_errors import readable
from agentevo.store.files import check_files
from agentevo.store.records import (
    SPLITS,
    Emptied,
    Lease,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskEvent,
    TrajectorySummary,
)
from agentevo.types import REWARD_PARTS, TIMINGS, FinishReason, Status, Task, Trajectory, Turn
from agentevo.types.image_span import ImageSpan, why_misplaced
from agentevo.types.images import images_of_task, images_of_trajectory
from agentevo.types.routed_experts import why_misaligned

T = TypeVar("T")
JSON = msgspec.json.Encoder(order="deterministic")
_MSGPACK = msgspec.msgpack.Encoder(order="deterministic")
_METRICS = msgspec.json.Decoder(dict[str, float])
_TASK = msgspec.json.Decoder(Task)
_HISTORY = msgspec.json.Decoder(list[TaskEvent])
_RECORD = msgspec.json.Decoder(dict[str, Any])
_STATUSES = get_args(Status)
_FINISH_REASONS = get_args(FinishReason)

_UNSTORABLE = (
    TypeError,
    ValueError,
    OverflowError,
    msgspec.MsgspecError,
)  # ValueError covers lone surrogates in text

SUMMARY_COLUMNS = TrajectorySummary.__struct_fields__
_TASK_PLACE = ("state", "fencing_id", "num_leases", "num_failures", "num_expiries", "error")
_LEDGER = ("state", "trained_step", "drop_reason", "written_at")
"""The columns of a task and of a trajectory that are its place in the ledger."""


class EncodedTask(msgspec.Struct, frozen=True):
    id: str
    digest: bytes
    row: dict[str, Any]
    images: tuple[str, ...] = ()
    """The digests of the images that the task names, each once."""


class EncodedTrajectory(msgspec.Struct, frozen=True):
    id: str
    digest: bytes
    row: dict[str, Any]
    """The row, without `seq`, which the database assigns."""
    data: bytes | None
    """The turns as one blob (blobs.py). None if the turns were deleted."""
    images: tuple[str, ...] = ()
    """The digests of the images that the trajectory names, each once."""


def encode_task(task: Task) -> EncodedTask:
    try:
        text = JSON.encode(task)
    except _UNSTORABLE as error:
        raise StoreError(
            f"task {task.id!r} can't be stored: {error}; answer and metadata must be plain JSON "
            "values"
        ) from error

    digest = _digest(text)
    row = {
        "id": task.id,
        "task": text.decode(),
        "digest": digest,
        "state": "queued",
        "fencing_id": 0,
        "num_leases": 0,
        "num_failures": 0,
        "num_expiries": 0,
        "not_before": 0.0,
        "worker": None,
        "lease_started_at": None,
        "lease_expires_at": None,
        "error": None,
        "history": "[]",
    }
    return EncodedTask(id=task.id, digest=digest, row=row, images=tuple(images_of_task(task)))


def encode_stored_task(stored: StoredTask) -> EncodedTask:
    """The row of an imported task. Leases are not imported, so a leased task becomes a queued
    one."""
    encoded = encode_task(stored.task)
    if stored.digest not in (b"", encoded.digest):
        raise StoreError(
            f"task {stored.task.id!r} is not the one that was exported (its digest differs): the "
            "file or its source store was changed"
        )

    ledger = {name: getattr(stored, name) for name in _TASK_PLACE}
    ledger["history"] = encode_history(stored.history)
    if stored.state == "leased":
        ledger["state"] = "queued"
    return msgspec.structs.replace(encoded, row=encoded.row | ledger)


def is_as_added(stored: StoredTask) -> bool:
    """Whether a task is unchanged since it was added to the store."""
    return encode_task(stored.task).digest == stored.digest


@readable("task")
def decode_task(row: Mapping[Any, Any]) -> StoredTask:
    task = _TASK.decode(row["task"])
    if task.id != row["id"]:
        raise ValueError(f"its row contains the task {task.id!r}")

    return StoredTask(
        task=task,
        history=decode_history(row["history"]),
        digest=bytes(row["digest"]),
        **{name: row[name] for name in _TASK_PLACE},
    )


@readable("task")
def decode_lease(row: Mapping[Any, Any], worker: str, *, now: float, lease_s: float) -> Lease:
    """The new lease of a task, from its row before the lease. Raises StoreError if the task was
    changed after it was added."""
    if _digest(row["task"].encode()) != bytes(row["digest"]):
        raise StoreError(
            "its row was changed after it was added (its digest differs): restore the store from a "
            "copy, or start a new run"
        )

    return Lease(
        task=_TASK.decode(row["task"]),
        fencing_id=row["fencing_id"] + 1,
        attempt=row["num_leases"] + 1,
        worker=worker,
        lease_s=lease_s,
        expires_at=now + lease_s,
    )


def encode_history(history: list[TaskEvent]) -> str:
    return JSON.encode(history).decode()


def decode_history(text: str) -> list[TaskEvent]:
    return _HISTORY.decode(text)


def encode_record(step: int, record: dict[str, Any]) -> str:
    try:
        return JSON.encode(record).decode()
    except _UNSTORABLE as error:
        raise StoreError(
            f"the record of step {step} can't be stored: {error}; use plain JSON values"
        ) from error


def encode_step(step: StepRecord) -> dict[str, Any]:
    """The row of an imported step."""
    return msgspec.structs.asdict(step) | {"record": encode_record(step.step, step.record)}


def canonical_record(step: int, record: dict[str, Any]) -> bytes:
    """The canonical JSON of a record, which is the same before storing and after reading."""
    return JSON.encode(_RECORD.decode(encode_record(step, record)))


@readable("step")
def decode_step(row: Mapping[Any, Any]) -> StepRecord:
    return StepRecord(
        step=row["step"],
        record=_RECORD.decode(row["record"]),
        num_trajectories=row["num_trajectories"],
        committed_at=row["committed_at"],
    )


def encode_trajectories(
    trajectories: Iterable[Trajectory], split: Split, step: int
) -> list[EncodedTrajectory]:
    """The rows and turns of new trajectories. Raises StoreError with the id of a trajectory that
    can't be stored."""
    if split not in SPLITS:
        raise StoreError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}")

    encoded = []
    for trajectory in trajectories:
        try:
            encoded.append(_encode_trajectory(trajectory, split, step))
        except _UNSTORABLE as error:
            raise StoreError(f"trajectory {trajectory.id!r} can't be stored: {error}") from error

    return encoded


def encode_stored(stored: StoredTrajectory) -> EncodedTrajectory:
    """The row of an imported trajectory, with the columns of the ledger and of deleted turns."""
    (encoded,) = encode_trajectories([stored.trajectory], stored.split, stored.step)
    row = encoded.row | {name: getattr(stored, name) for name in _LEDGER}
    if not stored.tokens_deleted:
        if stored.digest not in (b"", encoded.digest):
            raise StoreError(
                f"trajectory {stored.trajectory.id!r} is not the one that was exported (its digest "
                "differs): the file or its source store was changed"
            )
        return msgspec.structs.replace(encoded, row=row)

    emptied_fields = {} if stored.emptied is None else msgspec.structs.asdict(stored.emptied)
    digest = stored.digest or encoded.digest
    return msgspec.structs.replace(
        encoded, digest=digest, row=row | emptied_fields | {"digest": digest}, data=None
    )


def is_as_written(stored: StoredTrajectory) -> bool:
    """Whether all columns and turns of a trajectory with turns are unchanged since it was written.
    The columns of the ledger and the times do not count."""
    try:
        columns, *contents = _content(stored.trajectory)
    except _UNSTORABLE:
        return False
    return _row_digest(columns, contents, stored.split, stored.step) == stored.digest


def content_digest(trajectory: Trajectory) -> bytes:
    """The sha256 of the whole trajectory except times. Log-probs count as float32, as the store
    keeps them. Raises StoreError for content that can't be stored."""
    try:
        return sha256(_MSGPACK.encode(_content(trajectory))).digest()
    except _UNSTORABLE as error:
        raise StoreError(f"trajectory {trajectory.id!r} has no digest: {error}") from error


def _encode_trajectory(trajectory: Trajectory, split: Split, step: int) -> EncodedTrajectory:
    columns, turns, *contents = _content(trajectory)
    times = {"started_at": trajectory.started_at, "duration_s": trajectory.duration_s}
    timings = {f"{TIMINGS}{name}": value for name, value in trajectory.timings.items()}
    _check_finite(times | timings)
    digest = _row_digest(columns, [turns, *contents], split, step)
    row = columns | {
        "metrics": _encode_metrics(_all_metrics(trajectory) | timings),
        "split": split,
        "step": int(step),
        "state": "ready" if trajectory.status == "completed" else "failed",
        "trained_step": None,
        "drop_reason": None,
        "num_turns": len(turns),
        "num_completion_tokens": trajectory.num_completion_tokens(),
        **{name: float(value) for name, value in times.items()},
        "digest": digest,
    }
    return EncodedTrajectory(
        id=trajectory.id,
        digest=digest,
        row=row,
        data=pack_turns(turns, *contents),
        images=tuple(images_of_trajectory(trajectory)),
    )


def _content(trajectory: Trajectory) -> tuple[Any, ...]:
    """The whole trajectory except times: columns of its row, turns, turns of remote models as JSON,
    stored files, and digests of named texts. Raises the errors in _UNSTORABLE."""
    if trajectory.status not in _STATUSES:
        raise ValueError(
            f"status {trajectory.status!r} is unknown: use one of {', '.join(_STATUSES)}"
        )

    metrics = _all_metrics(trajectory)
    _check_finite({"reward": trajectory.reward, **metrics})
    turns = [_encode_turn(turn, position) for position, turn in enumerate(trajectory.turns)]
    columns: dict[str, object] = {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "attempt": int(trajectory.attempt),
        "status": trajectory.status,
        "reward": _stored_float(trajectory.reward),
        "success": bool(trajectory.success),
        "error": trajectory.error,
        "truncated": bool(trajectory.truncated),
        "metrics": _encode_metrics(metrics),
    }
    remote = ""
    files = trajectory.files

    if trajectory.remote_turns:
        _check_finite({"the cost of a remote turn": sum(t.cost for t in trajectory.remote_turns)})
        remote = JSON.encode(trajectory.remote_turns).decode()

    if trajectory.texts:
        return columns, turns, remote, check_files(files), dict(sorted(trajectory.texts.items()))
    if files:
        return columns, turns, remote, check_files(files)

    return (columns, turns, remote) if remote else (columns, turns)


def _all_metrics(trajectory: Trajectory) -> dict[str, float]:
    """The metrics and the parts of the reward. Raises ValueError for a metric with a reserved
    name."""
    for name in trajectory.metrics:
        if name.startswith((REWARD_PARTS, TIMINGS)):
            subject = "parts of the reward" if name.startswith(REWARD_PARTS) else "times"
            raise ValueError(
                f"the metric {name!r} has a name that is reserved for {subject}: rename it, or "
                "report the value among those"
            )

    return trajectory.metrics | {
        f"{REWARD_PARTS}{name}": value for name, value in trajectory.reward_parts.items()
    }


def _encode_metrics(metrics: Mapping[str, float]) -> str:
    return JSON.encode({name: float(value) for name, value in metrics.items()}).decode()


def _row_digest(
    columns: Mapping[str, object], contents: list[Any], split: Split, step: int
) -> bytes:
    """`contents`: the values of `_content` after the columns."""
    return _digest(_MSGPACK.encode(({**columns, "split": split, "step": int(step)}, *contents)))


def _digest(content: bytes) -> bytes:
    """The digest of a row's content."""
    return blake2b(content, digest_size=16).digest()


def _check_finite(numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(
                f"{name} is {value}: record the trajectory as failed, with the reason as its error"
            )


def _stored_float(value: float) -> float:
    """The float that SQLite returns for a value. SQLite drops the sign of zero, so the digest must
    not depend on that sign."""
    return float(value) + 0.0


def _encode_turn(turn: Turn, position: int) -> dict[str, object]:
    if turn.index != position:
        raise ValueError(f"the turn at position {position} has index {turn.index}")

    if turn.parent is not None and not 0 <= turn.parent < turn.index:
        raise ValueError(
            f"turn {turn.index} has parent {turn.parent}: a parent comes before its children"
        )

    if not len(turn.completion_ids) == len(turn.logprobs) == len(turn.versions):
        lengths = (
            f"{len(turn.completion_ids)} completion_ids, {len(turn.logprobs)} logprobs, "
            f"{len(turn.versions)} versions"
        )
        raise ValueError(f"turn {turn.index} has {lengths}: there must be one of each per token")

    if turn.routed_experts is not None and (problem := why_misaligned(turn)):
        raise ValueError(problem)
    if turn.teacher_logprobs is not None:
        _check_teacher(turn)
    _check_images(turn)
    if turn.finish_reason not in _FINISH_REASONS:
        raise ValueError(f"turn {turn.index} has the unknown finish_reason {turn.finish_reason!r}")

    if not (math.isfinite(turn.reward) and math.isfinite(turn.temperature)):
        raise ValueError(
            f"turn {turn.index} has reward {turn.reward} and temperature {turn.temperature}: "
            "both must be finite"
        )

    return {
        "turn_index": turn.index,
        "parent": turn.parent,
        "prompt_ids": to_bytes(turn.prompt_ids),
        "completion_ids": to_bytes(turn.completion_ids),
        "logprobs": to_bytes(turn.logprobs),
        "versions": to_bytes(turn.versions),
        "finish_reason": turn.finish_reason,
        "temperature": _stored_float(turn.temperature),
        "seed": str(int(turn.seed)),
        "reward": _stored_float(turn.reward),
        "messages": JSON.encode(turn.messages).decode(),
        **({} if turn.overrides is None else {"overrides": turn.overrides.given()}),
        **({"tools": turn.tools} if turn.tools else {}),
        **(
            {}
            if turn.constraint is None
            else {"constraint": msgspec.structs.asdict(turn.constraint)}
        ),
        **({} if turn.penalties is None else {"penalties": msgspec.to_builtins(turn.penalties)}),
        **({} if turn.routed_experts is None else {"routed_experts": turn.routed_experts}),
        **(
            {}
            if turn.teacher_logprobs is None
            else {"teacher_logprobs": to_bytes(turn.teacher_logprobs)}
        ),
        **({"images": [_encode_span(span) for span in turn.images]} if turn.images else {}),
        **({"processor": turn.processor} if turn.processor else {}),
    }


def _encode_span(span: ImageSpan) -> list[object]:
    return [int(span.offset), int(span.length), [int(size) for size in span.grid], span.digest]


def _check_images(turn: Turn) -> None:
    """Raises ValueError for images whose tokens are not in the turn's prompt."""
    wrong = why_misplaced(turn.images, len(turn.prompt_ids))
    if turn.images and not turn.processor:
        wrong = "it has images without the fingerprint of their processor: give processor"
    if wrong:
        raise ValueError(f"turn {turn.index}: {wrong}")


def _check_teacher(turn: Turn) -> None:
    """Raises ValueError unless a teacher scored each token of the completion with a number."""
    scores = turn.teacher_logprobs or ()
    if len(scores) != len(turn.completion_ids) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"turn {turn.index} has {len(scores)} teacher_logprobs for {len(turn.completion_ids)} "
            "completion_ids: there must be a finite number for each"
        )


@readable("trajectory")
def decode_stored(row: Mapping[Any, Any], data: bytes | None) -> StoredTrajectory:
    metrics = _METRICS.decode(row["metrics"])
    remote, files, texts = ([], {}, {}) if data is None else unpack_extras(data)
    emptied = Emptied(
        num_turns=row["num_turns"], num_completion_tokens=row["num_completion_tokens"]
    )
    trajectory = Trajectory(
        id=row["id"],
        task_id=row["task_id"],
        group_id=row["group_id"],
        attempt=int(row["attempt"]),
        turns=[] if data is None else unpack_turns(data),
        remote_turns=remote,
        files=files,
        texts=texts,
        reward=float(row["reward"]),
        reward_parts=_with_prefix(REWARD_PARTS, metrics),
        success=row["success"],
        status=row["status"],
        error=row["error"],
        truncated=row["truncated"],
        metrics={
            name: value
            for name, value in metrics.items()
            if not name.startswith((REWARD_PARTS, TIMINGS))
        },
        started_at=row["started_at"],
        duration_s=row["duration_s"],
        timings=_with_prefix(TIMINGS, metrics),
    )
    return StoredTrajectory(
        trajectory=trajectory,
        split=cast(Split, row["split"]),
        step=row["step"],
        tokens_deleted=data is None,
        emptied=emptied if data is None else None,
        digest=bytes(row["digest"]),
        **{name: row[name] for name in _LEDGER},
    )


def _with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }


@readable("trajectory")
def decode_summary(row: Mapping[Any, Any]) -> TrajectorySummary:
    return TrajectorySummary(
        metrics=_METRICS.decode(row["metrics"]),
        **{name: row[name] for name in SUMMARY_COLUMNS if name != "metrics"},
    )
