"""Records to rows and back, exactly: `decode(encode(x)) == x` with log-probs rounded to float32. Formats of the columns: tables.py.

The digest of a row covers everything that was given to the store but the timings, so that "the same content again" can be told from a clash
of ids without reading the turns. Anything that could not be read back as it was is refused here, before a transaction starts.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import Row

from agentevo.errors import StoreError
from agentevo.store.store import SPLITS, Split, StoredTrajectory, TrajectorySummary
from agentevo.types import FinishReason, Message, Status, Task, Trajectory, Turn

JSON = msgspec.json.Encoder(order="deterministic")
_MSGPACK = msgspec.msgpack.Encoder(order="deterministic")
_MESSAGES = msgspec.json.Decoder(list[Message])
_METRICS = msgspec.json.Decoder(dict[str, float])
_TASK = msgspec.json.Decoder(Task)
_PART = "reward_parts/"
"""In the column `metrics`, the parts of the reward stand beside the metrics under names that begin like this."""

_UNSTORABLE = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)  # ValueError covers lone surrogates in text


class EncodedTask(msgspec.Struct, frozen=True):
    id: str
    digest: bytes
    row: dict[str, object]


class EncodedTrajectory(msgspec.Struct, frozen=True):
    id: str
    digest: bytes
    row: dict[str, object]
    turns: list[dict[str, object]]
    """Without `trajectory_seq`, which the database gives out."""


def pack_ints(values: Iterable[int]) -> bytes:
    """Little-endian int32. Raises OverflowError or TypeError for what is not one."""
    return _little_endian(array("i", values))


def unpack_ints(blob: bytes) -> list[int]:
    return _little_endian_array("i", blob).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Little-endian float32, rounded to nearest. Raises OverflowError for a finite number beyond float32's range."""
    packed = array("f", values)
    if not math.isfinite(sum(packed)):
        for value, rounded in zip(values, packed, strict=True):
            if math.isinf(rounded) and not math.isinf(value):
                raise OverflowError(f"{value} does not fit in a float32")
    return _little_endian(packed)


def unpack_floats(blob: bytes) -> list[float]:
    return _little_endian_array("f", blob).tolist()


def _little_endian(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _little_endian_array(typecode: str, blob: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def encode_task(task: Task) -> EncodedTask:
    try:
        text = JSON.encode(task)
    except _UNSTORABLE as error:
        raise StoreError(f"task {task.id!r} can't be stored: {error}; answer and metadata must be plain JSON values") from error
    digest = blake2b(text, digest_size=16).digest()
    row = {"id": task.id, "task": text.decode(), "digest": digest, "state": "queued", "fencing_id": 0, "num_leases": 0}
    return EncodedTask(id=task.id, digest=digest, row=row)


def decode_task(text: str) -> Task:
    return _TASK.decode(text)


def encode_trajectories(trajectories: Iterable[Trajectory], split: Split, step: int) -> list[EncodedTrajectory]:
    """Raises StoreError naming the trajectory that can't be stored."""
    if split not in SPLITS:
        raise StoreError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}")
    encoded = []
    for trajectory in trajectories:
        try:
            encoded.append(_encode_trajectory(trajectory, split, step))
        except _UNSTORABLE as error:
            raise StoreError(f"trajectory {trajectory.id!r} can't be stored: {error}") from error
    return encoded


def _encode_trajectory(trajectory: Trajectory, split: Split, step: int) -> EncodedTrajectory:
    if trajectory.status not in get_args(Status):
        raise ValueError(f"status {trajectory.status!r} is unknown: use one of {', '.join(get_args(Status))}")
    for name in trajectory.metrics:
        if name.startswith(_PART):
            raise ValueError(f"the metric {name!r} has a name that parts of the reward have: choose another, or give it as a part")
    measured = trajectory.metrics | {f"{_PART}{name}": value for name, value in trajectory.reward_parts.items()}
    numbers = {"reward": trajectory.reward, "started_at": trajectory.started_at, "duration_s": trajectory.duration_s, **measured}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: record the trajectory as failed, with the reason as its error")
    turns = [_encode_turn(turn, position) for position, turn in enumerate(trajectory.turns)]
    facts: dict[str, object] = {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "attempt": int(trajectory.attempt),
        "split": split,
        "step": int(step),
        "status": trajectory.status,
        "reward": _number(trajectory.reward),
        "success": bool(trajectory.success),
        "error": trajectory.error,
        "truncated": bool(trajectory.truncated),
        "metrics": JSON.encode({name: float(value) for name, value in measured.items()}).decode(),
    }
    digest = blake2b(_MSGPACK.encode((facts, turns)), digest_size=16).digest()
    row = facts | {
        "state": "failed" if trajectory.status == "failed" else "ready",
        "num_turns": len(turns),
        "num_completion_tokens": trajectory.num_completion_tokens(),
        "started_at": float(trajectory.started_at),
        "duration_s": float(trajectory.duration_s),
        "digest": digest,
    }
    return EncodedTrajectory(id=trajectory.id, digest=digest, row=row, turns=turns)


def _number(value: float) -> float:
    """A float as SQLite gives it back: it keeps no sign of zero, and the digest must not see one either."""
    return float(value) + 0.0


def _encode_turn(turn: Turn, position: int) -> dict[str, object]:
    if turn.index != position:
        raise ValueError(f"the turn at position {position} has index {turn.index}")
    if turn.parent is not None and not 0 <= turn.parent < turn.index:
        raise ValueError(f"turn {turn.index} has parent {turn.parent}: a parent comes before its children")
    if not len(turn.completion_ids) == len(turn.logprobs) == len(turn.versions):
        lengths = f"{len(turn.completion_ids)} completion_ids, {len(turn.logprobs)} logprobs, {len(turn.versions)} versions"
        raise ValueError(f"turn {turn.index} has {lengths}: there must be one of each per token")
    if turn.finish_reason not in get_args(FinishReason):
        raise ValueError(f"turn {turn.index} has the unknown finish_reason {turn.finish_reason!r}")
    if not (math.isfinite(turn.reward) and math.isfinite(turn.temperature)):
        raise ValueError(f"turn {turn.index} has reward {turn.reward} and temperature {turn.temperature}: both must be finite")
    return {
        "turn_index": turn.index,
        "parent": turn.parent,
        "prompt_ids": pack_ints(turn.prompt_ids),
        "completion_ids": pack_ints(turn.completion_ids),
        "logprobs": pack_floats(turn.logprobs),
        "versions": pack_ints(turn.versions),
        "finish_reason": turn.finish_reason,
        "temperature": _number(turn.temperature),
        "seed": str(int(turn.seed)),
        "reward": _number(turn.reward),
        "messages": JSON.encode(turn.messages).decode(),
    }


def decode_turn(row: Row[Any]) -> Turn:
    return Turn(
        index=row.turn_index,
        parent=row.parent,
        prompt_ids=unpack_ints(row.prompt_ids),
        completion_ids=unpack_ints(row.completion_ids),
        logprobs=unpack_floats(row.logprobs),
        versions=unpack_ints(row.versions),
        finish_reason=cast(FinishReason, row.finish_reason),
        temperature=row.temperature,
        seed=int(row.seed),
        reward=row.reward,
        messages=_MESSAGES.decode(row.messages),
    )


def decode_stored(row: Row[Any], turns: list[Turn]) -> StoredTrajectory:
    measured = _METRICS.decode(row.metrics)
    trajectory = Trajectory(
        id=row.id,
        task_id=row.task_id,
        group_id=row.group_id,
        attempt=row.attempt,
        turns=turns,
        reward=row.reward,
        reward_parts={name.removeprefix(_PART): value for name, value in measured.items() if name.startswith(_PART)},
        success=row.success,
        status=row.status,
        error=row.error,
        truncated=row.truncated,
        metrics={name: value for name, value in measured.items() if not name.startswith(_PART)},
        started_at=row.started_at,
        duration_s=row.duration_s,
    )
    return StoredTrajectory(
        trajectory=trajectory,
        split=row.split,
        step=row.step,
        state=row.state,
        trained_step=row.trained_step,
        drop_reason=row.drop_reason,
        written_at=row.written_at,
    )


_SUMMARY_COLUMNS = tuple(name for name in TrajectorySummary.__struct_fields__ if name != "metrics")


def decode_summary(row: Row[Any]) -> TrajectorySummary:
    return TrajectorySummary(metrics=_METRICS.decode(row.metrics), **{name: getattr(row, name) for name in _SUMMARY_COLUMNS})
