"""The refusals of the ledger, the same for every backend: pure functions of rows that a transaction
has read and locked.

Each function returns the rows to change. If a row is not in the start state of the transition, the
function refuses the call and names the row. So a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from agentevo.errors import StoreError
from agentevo.store.records import SPLITS, Lease, RetryPolicy, Split, TaskState


class TaskPlace(NamedTuple):
    """The state of a task that the rules need."""

    state: str
    fencing_id: int


class TrajectoryPlace(NamedTuple):
    """The state of a trajectory that the rules need."""

    split: str
    state: str
    trained_step: int | None
    drop_reason: str | None


def must_change(row: TaskPlace | None, lease: Lease, target: str | tuple[str, ...]) -> bool:
    """Whether the lease's task must still change to `target`. False if it already has that state.
    Refuses a lease that is lost."""
    name = lease.task.id
    states = (target,) if isinstance(target, str) else target
    if row is None:
        raise StoreError(
            f"no task {name!r} in this store, but {lease.worker!r} holds a lease on it: was the "
            "store replaced?"
        )

    if row.fencing_id != lease.fencing_id:
        raise StoreError(
            f"task {name!r}: the lease {lease.fencing_id} of {lease.worker!r} ran out and the "
            "task has moved on "
            f"(fencing id {row.fencing_id}): discard this attempt, or lease for longer"
        )

    if row.state in states:
        return False

    if row.state != "leased":
        refused = f"can't become {' or '.join(states)}" if states else "has no lease"
        raise StoreError(f"task {name!r} is already {row.state} and {refused}")

    return True


def after_failure(num_failures: int, retries: RetryPolicy) -> TaskState:
    """The state of a task after this many failures."""
    return "poison" if num_failures >= retries.max_failures else "queued"


def check_reservable(step: int, *, committed: bool) -> None:
    if committed:
        raise StoreError(f"step {step} is already committed: nothing can be reserved for it")


def _refusal(name: str, move: str, reason: str) -> StoreError:
    return StoreError(f"trajectory {name!r} can't be {move}: {reason}")


def _stored_places(
    ids: Iterable[str], rows: Mapping[str, TrajectoryPlace], move: str
) -> Iterator[tuple[str, TrajectoryPlace]]:
    """Each of the ids once, with its row. Raises StoreError for an id that is not in the store."""
    for name in dict.fromkeys(ids):
        if name not in rows:
            raise _refusal(name, move, "it is not in the store; write it first")
        yield name, rows[name]


def moving_to_reserved(
    ids: Iterable[str], rows: Mapping[str, TrajectoryPlace], step: int
) -> list[str]:
    move = f"reserved for step {step}"
    moving = []
    for name, row in _stored_places(ids, rows, move):
        if row.split != "train":
            reason = f"its split is {row.split!r}, only 'train' is trained on"
            raise _refusal(name, move, reason)

        if row.state == "ready":
            moving.append(name)
        elif (row.state, row.trained_step) != ("reserved", step):
            at = "" if row.trained_step is None else f"({row.trained_step})"
            raise _refusal(name, move, f"it is {row.state}{at}, not ready")

    return moving


def must_commit(
    step: int,
    record: str,
    *,
    stored_record: str | None,
    ids: Iterable[str] | None,
    step_ids: set[str],
) -> bool:
    """Whether the step must still be written. `stored_record` is the step's record if the step is
    stored. `step_ids` are the trajectories that are reserved for it or committed to it."""
    if ids is not None:
        expected_ids = set(ids)
        for problem, names in (
            ("is not reserved for it", expected_ids - step_ids),
            ("is reserved for it but not part of it", step_ids - expected_ids),
        ):
            if names:
                omitted = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise StoreError(
                    f"step {step} can't be committed: trajectory {min(names)!r}{omitted} {problem}"
                )

    if stored_record is not None and stored_record != record:
        raise StoreError(
            f"step {step} is already committed with another record: rewind to step {step - 1} "
            "before doing it again"
        )

    return stored_record is None


def moving_to_dropped(
    ids: Iterable[str], rows: Mapping[str, TrajectoryPlace], reason: str
) -> list[str]:
    move = f"dropped ({reason})"
    moving = []
    for name, row in _stored_places(ids, rows, move):
        if row.state == "committed":
            raise _refusal(name, move, f"step {row.trained_step} was trained on it")
        if row.state == "dropped" and row.drop_reason != reason:
            raise _refusal(name, move, f"it was dropped before ({row.drop_reason})")
        if row.state in ("ready", "reserved"):
            moving.append(name)

    return moving


def check_rewind(step: int, *, is_committed: bool) -> None:
    if step > 0 and not is_committed:
        raise StoreError(
            f"can't rewind to step {step}: it was never committed; `steps()` lists those that were"
        )


def check_split(split: Split) -> None:
    if split not in SPLITS:
        raise StoreError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}")


def check_group(split: Split, size: int, limit: int) -> None:
    if size < 1 or limit < 0:
        raise StoreError(
            f"ready_groups({split!r}, size={size}, limit={limit}): a group has at least one "
            "member, and a limit is not negative"
        )


def is_ready_group(states: Iterable[str], size: int) -> bool:
    """See `Store.ready_groups`. `states` are those of the members that have been written."""
    members = list(states)
    return (
        len(members) >= size
        and "ready" in members
        and not {"reserved", "committed"}.intersection(members)
    )


def lacks_members(attempts: Iterable[int], size: int) -> bool:
    """Whether a group has lost members. A group is written whole: its attempts are numbered from 0,
    and there are at least `size`."""
    numbers = sorted(attempts)
    return numbers != list(range(max(size, len(numbers))))


def check_same_content(kind: str, name: str, digest: bytes, stored_digest: bytes) -> None:
    if digest != stored_digest:
        raise StoreError(
            f"{kind}: {name!r} is already stored with other content: use different ids for "
            "different attempts (after a resume from an older checkpoint, call rewind first)"
        )
