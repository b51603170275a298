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
step's record. (2) Only trajectories of the split `train` can be reserved. (3) Every call takes
effect whole or not at all, and repeating a call changes nothing. So after `DeadlineExceededError`
or `StoreUnavailableError` a caller may repeat its call. (`lease_task` then leaves a lease that
expires. On MongoDB, `gc` and `clear` run in pieces, and the second call completes them.) (4) A
record reads back as it was written, except that log-probs are rounded to float32.

Only `rewind` deletes facts: it undoes steps whose weights were lost by a resume from an older
checkpoint. `clear` deletes all facts.

All holders of leases share a clock that no process sets (clock.py). No lease has more time left
than its own length, and no task waits longer than RetryPolicy's longest delay, even if a clock
jumps.

A store object belongs to one event loop. Any number of processes may open the same store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, Self, Unpack

from agentevo.errors import UnusableStoreError
from agentevo.runtime.credentials import with_environment, without_password
from agentevo.runtime.registry import Registry
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
"""The maximum time in seconds that a call waits for a database that can't be reached or for another
process's lock. The call's deadline may be longer, because its work may take long."""
NONE_DROPPED: Mapping[str, Sequence[str]] = MappingProxyType({})


class Store(Protocol):
    """The operations of every backend. All calls raise `StoreError` for refusals,
    `StoreUnavailableError` (a subclass) while the database can't be reached, and
    `DeadlineExceededError` when the database is too slow."""

    async def close(self) -> None:
        """Closes connections and files. The object can't be used afterwards."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...

    async def add_tasks(self, tasks: Iterable[Task], *, queue: bool = True) -> int:
        """Queues tasks and returns the number of new ones. If a known id has other content, no task
        is queued.

        Without `queue`, tasks are completed from the start, for a caller that makes the attempts
        itself. No worker ever leases them. Known tasks that are queued become completed too. Known
        tasks in any other state keep it.
        """

    async def task(self, task_id: str) -> Task: ...

    async def stored_task(self, task_id: str) -> StoredTask: ...

    def tasks(
        self, *, state: TaskState | None = None, after: str | None = None
    ) -> AsyncIterator[StoredTask]:
        """Streams tasks in the order in which they were added, starting behind task `after`."""

    async def lease_task(self, worker: str, *, lease_s: float) -> Lease | None:
        """`lease_tasks` with a limit of one. None if no task is available."""

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        """Leases up to `limit` tasks: first those with lost leases, then due retries, then the
        oldest queued tasks."""

    async def renew(self, lease: Lease, *, lease_s: float | None = None) -> Lease:
        """The heartbeat: from now on, the lease lasts `lease_s` more seconds (by default as many as
        before). Refused if the lease is lost."""

    async def complete_task(self, lease: Lease) -> None:
        """Completes the task. Refused if the task was leased again in the meantime."""

    async def fail_task(self, lease: Lease, error: str) -> None:
        """Fails the task, because another try would not help. Refused if the task was leased again
        in the meantime."""

    async def retry_task(self, lease: Lease, error: str) -> TaskState:
        """Returns the task to the queue after a delay, or makes it poison, because the
        infrastructure failed. Returns "queued" or "poison". Refused if the task was leased again in
        the meantime."""

    async def return_task(self, lease: Lease) -> None:
        """Returns the task to the queue at once and without counting a failure, because the worker
        stops. Refused if the task was leased again in the meantime."""

    async def queue_again(self) -> int:
        """poison, failed -> queued, after the cause was fixed. Returns the number of tasks.
        Failures and expiries count from 0 again, and the history stays."""

    async def write_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        split: Split,
        step: int,
        lease: Lease | None = None,
    ) -> int:
        """Writes all trajectories or none, and returns the number of new ones. `step` is the step
        that they were sampled for.

        A known id with the same content (except the timings `started_at` and `duration_s`) changes
        nothing. A known id with other content is refused. With `lease`, the same transaction
        completes the task. A holder that has lost the lease writes nothing.
        """

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        """ready -> reserved(step), for all ids or none. Returns how many were newly reserved."""

    async def commit_step(
        self,
        step: int,
        record: dict[str, Any],
        *,
        ids: Iterable[str] | None = None,
        dropped: Mapping[str, Sequence[str]] = NONE_DROPPED,
    ) -> int:
        """Records the step and changes every trajectory reserved for it to committed(step). Returns
        the number of trajectories. The same transaction drops the trajectories that the step leaves
        out: `dropped` maps a reason to ids, see `drop`.

        With `ids`, the call is refused unless exactly these ids are reserved for the step.
        Repeating the call with the same record changes nothing. A trainer that saves a checkpoint
        of the step writes the files first. Then it commits the checkpoint's identity in the same
        record, and so in the same transaction: `record["checkpoint"] = {"path": ..., "sha256":
        ...}`. A checkpoint that no record names is incomplete.
        """

    async def release(self, step: int | None = None) -> int:
        """reserved(step) -> ready, after a crash. None releases every reservation. Returns the
        number of trajectories."""

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        """ready or reserved -> dropped(reason). Returns the number of trajectories. Failed
        trajectories keep their own reason, and committed ones are refused."""

    async def rewind(self, step: int, *, keep: bool = False) -> int:
        """Returns the store to the moment when `step` was committed, to resume from its checkpoint.
        Returns the number of deleted trajectories.

        Later steps and all trajectories sampled for them are deleted: their weights are lost, so
        they could not be replayed. Earlier trajectories that were trained on in later steps become
        ready again. Tasks are queued again if they are leased, or if they lost their only
        trajectories and had some to train on. Late writers are refused.

        With `keep`, nothing is deleted and leases stay. Later steps lose their records and
        trajectories. Dropped trajectories that were sampled for later steps become ready again,
        unless `gc` has deleted their tokens. Returns the number of trajectories that became ready.
        """

    async def trajectory(self, trajectory_id: str) -> Trajectory: ...

    def trajectories(self, **filters: Unpack[TrajectoryFilter]) -> AsyncIterator[StoredTrajectory]:
        """Streams trajectories, without those that are written after the first one is read."""

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]: ...

    async def written(self, seqs: range, *, limit: int) -> list[tuple[int, StoredTrajectory]]:
        """At most `limit` of the trajectories whose numbers are in `seqs`, as (number, trajectory)
        in order. Numbers start at 1 and grow as rows are written. They may have gaps, and a number
        is used again only after a `rewind` or `clear`."""

    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]: ...

    async def ready_groups(self, split: Split, *, size: int, limit: int) -> list[str]:
        """Ids of up to `limit` groups that can be trained on, in the order of their first ready
        members.

        Such a group has at least `size` members. At least one is ready, and none is reserved or
        committed. Failed, cancelled and dropped attempts count as members. Read the group with
        `trajectories(group_id=...)`. When none of its members is ready, it is no longer listed.
        """

    async def outstanding(self, split: Split) -> int:
        """The number of outstanding tasks: those that are queued or leased, and those with a
        trajectory of `split` that is ready or reserved. The cost grows with the answer and not with
        the store."""

    async def steps(
        self, *, after: int | None = None, limit: int | None = None
    ) -> list[StepRecord]:
        """Committed steps in the order of their numbers, at most `limit`. With `after`, only those
        with larger numbers. The cost grows only with the answer."""

    async def last_step(self) -> StepRecord | None: ...

    async def counts(self) -> dict[str, int]:
        """`tasks/STATE`, `trajectories/SPLIT/STATE` for every split and state, `turns` and
        `steps`."""

    async def write_calls(self, calls: Iterable[Call]) -> None:
        """Writes calls that have started, or writes them again after they have ended. Calls without
        an end count as running for LOST_S seconds (calls.py)."""

    async def renew_calls(self, recorder: str) -> None:
        """Marks the calls of this recorder that have not ended as running for LOST_S more
        seconds."""

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
        """Imports rows with their places in the ledger, in this order. Returns the number of new
        rows. Content is compared as in a write, and known calls stay unchanged.

        Leases are not imported: a leased task is queued, and a running call is lost.
        """

    async def gc(self, *, dropped: bool = False, lease_grace_s: float = 3600.0) -> dict[str, int]:
        """Cleans the store. Tasks whose `leases` expired longer ago than the grace period are
        queued again. `orphans` (tokens without a trajectory) are deleted. So are the `calls` of
        attempts that started longer ago than the grace period and never became a trajectory.

        With `dropped`, the turns of dropped trajectories (`tokens`) and their calls are deleted
        too. Those that a resumed trainer may read stay: they were sampled for a step after the last
        committed one, or another attempt at their task is ready or reserved. Then the disk gets the
        space back (`bytes`: how much). Returns these numbers.
        """

    async def clear(self) -> int:
        """Deletes all calls, tasks, trajectories and steps, for a run that replaces another.
        Returns how many tasks, trajectories and steps were deleted. No other process may use the
        store: a worker with an old lease could not be distinguished from a worker of the new
        run."""


class StoreOpener(Protocol):
    """Opens a store of one kind. Registered under the scheme of its URL."""

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
"""Maps a URL's scheme to the module of this package that registers its opener. The module is
imported when it is needed."""


async def open_store(
    url: str,
    *,
    timeout_s: float = 60.0,
    create: bool = True,
    retries: RetryPolicy = RETRIES,
    clock: Clock | None = None,
    read_only: bool = False,
) -> Store:
    """Opens the store at `url`: `sqlite:///PATH`, `postgresql://USER@HOST/DATABASE?schema=NAME` or
    `mongodb://HOST/DATABASE`. Creates the store if needed, unless `create` is false.

    `${env:NAME}` in the URL is replaced by the environment variable. `timeout_s` is the deadline of
    each call on the store, this one included. A call waits for an unavailable database for at most
    AWAY_S seconds. `clock` replaces the store's own clock, for tests. `read_only` needs no write
    permission and creates or changes nothing. An older schema and calls that write are refused.
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
