"""The store: append-only facts (tasks, trajectories, steps) and a ledger with the state of each of
them.

    task         queued -> leased -> completed
                 leased -> failed     fail_task: the attempt itself failed, which is a result leased
                 -> queued     retry_task: the infrastructure failed; the task waits for a
                                      back-off. return_task: the worker stops
                 leased -> leased     when the lease ran out: the task gets a new fencing id, and
                                      the holder of the old one is refused
                 leased -> poison     instead of the two above, at the bounds of RetryPolicy: the
                                      task is set aside with its error and its history
                 poison, failed -> queued     queue_again
    trajectory   ready -> reserved(step) -> committed(step)
                 reserved -> ready    release: the step never happened
                 ready, reserved -> dropped(reason)
                 failed               from the start, for attempts that failed or were cancelled:
                                      they are never trained on

Invariants. (1) A trajectory is committed to at most one step, in the transaction that writes the
step's record. (2) Only trajectories of the split `train` can be reserved. (3) Every call happens
whole or not at all, and repeating one that has happened changes nothing, so a caller that got
`DeadlineExceededError` or `StoreUnavailableError` may simply call again (`lease_task` then leaves a
lease behind, to run out; on MongoDB `gc` and `clear` happen in pieces, and the second call does the
rest). (4) What is read back equals what was written, except that log-probs are rounded to float32.

Only `rewind` deletes facts: it undoes steps whose weights a resume from an older checkpoint has
lost. `clear` deletes all of them.

Leases are timed by a clock that all holders share and that no one sets (clock.py). No lease has
more time left than its own length, and no task waits for longer than RetryPolicy's longest delay,
even if a clock jumps.

A store object belongs to one event loop; any number of processes may open the same store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, Self, Unpack

from agentevo.credentials import with_environment, without_password
from agentevo.errors import UnusableStoreError
from agentevo.registry import Registry
from agentevo.store.calls import CallFilter, StoredCall
from agentevo.store.clock import Clock
from agentevo.store.records import (
    RETRIES,
    Lease,
    RetryPolicy,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskState,
    TrajectoryFilter,
    TrajectorySummary,
)
from agentevo.types import Call, Task, Trajectory

AWAY_S = 60.0
"""How long a call waits, at most, for a database that can't be reached or for another process's
lock, however long its work may take: a deadline is long where the work is."""
NONE_DROPPED: Mapping[str, Sequence[str]] = MappingProxyType({})


class Store(Protocol):
    """The operations of every backend. All calls raise `StoreError` for refusals,
    `StoreUnavailableError` (one of them) while the database can't be reached, and
    `DeadlineExceededError` when it is too slow."""

    async def close(self) -> None:
        """Closes connections and files; the object can't be used afterwards."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...

    async def add_tasks(self, tasks: Iterable[Task], *, queue: bool = True) -> int:
        """Queues tasks; returns how many are new. Where a known id has other content, none is.

        Without `queue` they are completed from the start, for a caller that makes the attempts
        itself: no worker ever leases them. Known ones that are queued are completed too; known
        ones in any other state stay there.
        """

    async def task(self, task_id: str) -> Task: ...

    async def stored_task(self, task_id: str) -> StoredTask: ...

    def tasks(
        self, *, state: TaskState | None = None, after: str | None = None
    ) -> AsyncIterator[StoredTask]:
        """Streams tasks in the order in which they were added, from behind task `after` on."""

    async def lease_task(self, worker: str, *, lease_s: float) -> Lease | None:
        """`lease_tasks` with a limit of one; None when there is none."""

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        """Up to `limit` tasks: of lost leases first, then due retries, then the oldest queued."""

    async def renew(self, lease: Lease, *, lease_s: float | None = None) -> Lease:
        """The heartbeat: `lease_s` more seconds (by default as many as before) from now on. Refused
        when the lease is lost."""

    async def complete_task(self, lease: Lease) -> None:
        """Completes the task. Refused when it has been leased again since."""

    async def fail_task(self, lease: Lease, error: str) -> None:
        """The task failed, and trying again would not help. Refused when the task has been leased
        again since."""

    async def retry_task(self, lease: Lease, error: str) -> TaskState:
        """The infrastructure failed: back to the queue after a delay, or set aside. Returns
        "queued" or "poison". Refused as above."""

    async def return_task(self, lease: Lease) -> None:
        """The worker stops: back to the queue at once, uncounted. Refused as above."""

    async def queue_again(self) -> int:
        """poison, failed -> queued, after the cause was fixed; returns how many. Retries and
        expiries are counted from 0 again, the history stays."""

    async def write_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        split: Split,
        step: int,
        lease: Lease | None = None,
    ) -> int:
        """Writes all or none; returns how many are new. `step` is the one that they were sampled
        for.

        A known id is a no-op when its content is the same (timings aside: `started_at`,
        `duration_s`) and refused when it differs. With `lease` the task is completed in the same
        transaction, and a holder that has lost the task writes nothing.
        """

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        """ready -> reserved(step), all or none; returns how many were newly reserved."""

    async def commit_step(
        self,
        step: int,
        record: dict[str, Any],
        *,
        ids: Iterable[str] | None = None,
        dropped: Mapping[str, Sequence[str]] = NONE_DROPPED,
    ) -> int:
        """Records the step and turns every trajectory reserved for it to committed(step); returns
        how many. In the same transaction it drops the trajectories that the step leaves out:
        `dropped` is reason -> ids, see `drop`.

        With `ids`, refused unless exactly those are reserved for the step. Committing again with
        the same record is a no-op. A trainer that saves a checkpoint of the step puts its identity
        into the same record, and so into the same transaction: `record["checkpoint"] = {"path":
        ..., "sha256": ...}`, after the files are on disk. A checkpoint that no record names is
        torn.
        """

    async def release(self, step: int | None = None) -> int:
        """reserved(step) -> ready, after a crash; None releases every reservation. Returns how
        many."""

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        """ready or reserved -> dropped(reason); returns how many. Failed ones keep their own
        reason; committed ones are refused."""

    async def rewind(self, step: int, *, keep: bool = False) -> int:
        """Back to the moment when `step` was committed, to resume from its checkpoint; returns how
        many trajectories were deleted.

        Later steps and all trajectories sampled for them are deleted (their weights are lost, so
        nothing could replay them); earlier trajectories that had gone into later steps are ready
        again; tasks that are leased, or lost their only trajectories and had some to train on, are
        queued again, and late writers refused.

        With `keep` nothing is deleted and no lease taken away. Later steps lose their records and
        what went into them, and what was dropped of the trajectories sampled for them is ready
        again, unless `gc` has deleted its tokens. Returns how many became ready.
        """

    async def trajectory(self, trajectory_id: str) -> Trajectory: ...

    def trajectories(self, **filters: Unpack[TrajectoryFilter]) -> AsyncIterator[StoredTrajectory]:
        """Streams trajectories, without those written after the first one was asked for."""

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]: ...

    async def written(self, seqs: range, *, limit: int) -> list[tuple[int, StoredTrajectory]]:
        """At most `limit` of the trajectories whose numbers are in `seqs`, with these, in order.
        Numbers grow as rows are written, from 1 on, may be left out, and are given again only after
        a `rewind` or `clear`."""

    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]: ...

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        """Ids of up to `limit` groups that can be trained on, those whose first ready member was
        written first in front.

        Such a group has at least `size` members, at least one of them ready, and none reserved or
        committed: what failed, was cancelled or dropped counts as a member. Read it with
        `trajectories(group_id=...)`; once none of its members is ready it is not listed again.
        """

    async def outstanding(self, split: Split) -> int:
        """Tasks on their way: queued or leased, and those with a trajectory of `split` that is
        ready or reserved. The cost grows with the answer and not with the store."""

    async def steps(
        self, *, after: int | None = None, limit: int | None = None
    ) -> list[StepRecord]:
        """Committed steps in order of their number, those above `after` or all, at most `limit`.
        The cost grows with the answer only."""

    async def last_step(self) -> StepRecord | None: ...

    async def counts(self) -> dict[str, int]:
        """`tasks/STATE`, `trajectories/SPLIT/STATE` for every split and state, `turns` and
        `steps`."""

    async def write_calls(self, calls: Iterable[Call]) -> None:
        """Writes calls that have begun, or writes them again once they have ended. Those that have
        not ended count as running for LOST_S seconds (calls.py)."""

    async def renew_calls(self, recorder: str) -> None:
        """Marks the unended calls of this recorder as running for LOST_S seconds more."""

    def calls(self, **filters: Unpack[CallFilter]) -> AsyncIterator[StoredCall]:
        """Streams calls, as `trajectories` streams trajectories."""

    async def num_calls(self) -> int: ...

    async def size_bytes(self) -> int:
        """The size of the store in bytes on its server's or this machine's disk."""

    async def put(
        self,
        *,
        tasks: Iterable[StoredTask] = (),
        trajectories: Iterable[StoredTrajectory] = (),
        steps: Iterable[StepRecord] = (),
        calls: Iterable[Call] = (),
    ) -> int:
        """Imports rows with their places in the ledger, in this order; returns how many are new.
        Content is compared as on writing, and known calls stay as they are.

        Leases are not imported: a leased task is queued here, and a running call is lost.
        """

    async def gc(self, *, dropped: bool = False, lease_grace_s: float = 3600.0) -> dict[str, int]:
        """Tidies up: `leases` that ran out longer ago than the grace are queued again, `orphans`
        (tokens without a trajectory) deleted, and so are the `calls` of attempts that began longer
        ago than the grace and never became a trajectory.

        With `dropped` the turns of dropped trajectories are deleted too (`tokens`), and their
        calls, but for those that a resumed trainer may ask for: that were sampled for a step after
        the last committed one, or while another attempt at their task is ready or reserved. Then
        the space is given back to the disk (`bytes`: how much less). Returns these numbers.
        """

    async def clear(self) -> int:
        """Deletes all calls, tasks, trajectories and steps, for a run that replaces another;
        returns how many of the last three. No other process may use the store: a worker with an old
        lease could not be distinguished from one of the new run."""


class StoreOpener(Protocol):
    """Opens a store of one kind; registered under the scheme of its URL."""

    async def __call__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        create: bool = True,
        retries: RetryPolicy = RETRIES,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> Store: ...


stores: Registry[StoreOpener] = Registry("stores")


SCHEMES = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "mongodb": "mongodb",
    "mongodb+srv": "mongodb",
}
"""Scheme of a URL -> the module of this package that registers its opener, imported when it is
asked for."""


async def open_store(
    url: str,
    *,
    timeout_s: float = 60.0,
    create: bool = True,
    retries: RetryPolicy = RETRIES,
    clock: Clock | None = None,
    read_only: bool = False,
) -> Store:
    """Opens the store at `url`, made on the spot unless `create` is false: `sqlite:///PATH`,
    `postgresql://USER@HOST/DATABASE?schema=NAME` or `mongodb://HOST/DATABASE`.

    `${env:NAME}` in the URL is an environment variable's value. `timeout_s` is the deadline of each
    call on it, this one included; it waits for an unavailable database for at most AWAY_S. `clock`
    replaces the store's own, for tests. `read_only` needs no write permission: nothing is created
    or changed, an older schema is refused, and so is every call that writes.
    """
    address = with_environment(url)
    scheme, separator, _ = address.partition("://")
    if not separator:
        raise UnusableStoreError(
            f"{without_password(url)!r} is not the URL of a store: write it as sqlite:///PATH, "
            "postgresql://... or mongodb://..."
        )

    for name in dict.fromkeys(SCHEMES.values()) if scheme not in SCHEMES else (SCHEMES[scheme],):
        import_module(f"agentevo.store.{name}")

    options: dict[str, Any] = {"retries": retries, "clock": clock, "read_only": read_only}
    may_create = create and not read_only
    return await stores.get(scheme)(address, timeout_s=timeout_s, create=may_create, **options)
