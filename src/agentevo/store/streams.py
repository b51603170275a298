"""Reads many rows page by page, on any backend that can read a page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Self, TypeVar, Unpack

from agentevo.errors import UnusableStoreError
from agentevo.store import rules
from agentevo.store.calls import CallFilter, CallState, StoredCall, checked_call_filters
from agentevo.store.records import (
    Lease,
    StoredTask,
    StoredTrajectory,
    TaskState,
    TrajectoryFilter,
    TrajectorySummary,
    checked_filters,
)
from agentevo.types import Task, Trajectory

PAGE = 64
"""The number of rows that a query reads while streaming."""
CALL_PAGE = 500
CHUNK = 500
"""The number of ids in an IN list, below every database's limit on bound parameters."""

T = TypeVar("T")


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


async def whole_groups(
    page: Callable[[int, int], Awaitable[list[tuple[int, str]]]],
    members: Callable[[list[str]], Awaitable[list[tuple[str, str]]]],
    *,
    size: int,
    limit: int,
) -> list[str]:
    """`Store.ready_groups`, by a walk over ready rows until enough groups are complete. The cost
    depends on the answer, not on the table.

    `page(after, length)` returns (seq, group id) of ready trajectories in the order of seq.
    `members(groups)` returns (group id, state) of each member.
    """
    ready: list[str] = []
    states: dict[str, list[str]] = {}
    after = 0
    length = max(64, 2 * size * min(limit, CHUNK))
    while len(ready) < limit:
        rows = await page(after, length)
        new = list(dict.fromkeys(group for _, group in rows if group not in states))
        states.update((group, []) for group in new)
        for group, state in await members(new):
            states[group].append(state)

        ready += [group for group in new if rules.is_ready_group(states[group], size)]
        if len(rows) < length:
            break

        after = rows[-1][0]

    return ready[:limit]


class Streaming(ABC):
    """The part of `Store` that is the same for every backend."""

    where: str
    """The name of the store in messages."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _newest_seq(self) -> int: ...

    @abstractmethod
    async def _page(
        self,
        properties: Mapping[str, object],
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredTrajectory]]:
        """At most `limit` matching (seq, trajectory), with seq in `seqs` unless that is None."""

    @abstractmethod
    async def written_summaries(
        self, seqs: range, *, limit: int
    ) -> list[tuple[int, TrajectorySummary]]: ...

    @abstractmethod
    async def _task_page(
        self, state: TaskState | None, *, after: int, limit: int
    ) -> list[tuple[int, StoredTask]]:
        """At most `limit` (seq, task), with seq above `after`, in that order."""

    @abstractmethod
    async def _newest_call_seq(self) -> int: ...

    @abstractmethod
    async def _call_page(
        self,
        trajectory_id: str | None,
        state: CallState | None,
        *,
        seqs: range | None,
        limit: int,
        newest_first: bool,
    ) -> list[tuple[int, StoredCall]]:
        """At most `limit` matching (seq, call), with seq in `seqs` unless that is None."""

    @abstractmethod
    async def _numbered_task(self, task_id: str) -> tuple[int, StoredTask]:
        """The task as (seq, task)."""

    @abstractmethod
    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def stored_task(self, task_id: str) -> StoredTask:
        return (await self._numbered_task(task_id))[1]

    async def task(self, task_id: str) -> Task:
        return (await self.stored_task(task_id)).task

    async def lease_task(self, worker: str, *, lease_s: float) -> Lease | None:
        return next(iter(await self.lease_tasks(worker, lease_s=lease_s, limit=1)), None)

    async def tasks(
        self, *, state: TaskState | None = None, after: str | None = None
    ) -> AsyncIterator[StoredTask]:
        seq = 0 if after is None else (await self._numbered_task(after))[0]
        while page := await self._task_page(state, after=seq, limit=PAGE):
            for _, stored in page:
                yield stored
            seq = page[-1][0]

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        page = await self._page({"id": trajectory_id}, seqs=None, limit=1, newest_first=False)
        if not page:
            raise UnusableStoreError(f"no trajectory {trajectory_id!r} in {self.where}")

        (stored,) = [stored for _, stored in page]
        if stored.tokens_deleted:
            raise UnusableStoreError(
                f"the turns of trajectory {trajectory_id!r} in {self.where} were deleted by "
                "`agentevo store RUN gc --dropped`"
            )

        return stored.trajectory

    async def trajectories(
        self, **filters: Unpack[TrajectoryFilter]
    ) -> AsyncIterator[StoredTrajectory]:
        properties, limit, newest_first = checked_filters(filters)

        def page(seqs: range | None, size: int) -> Awaitable[list[tuple[int, StoredTrajectory]]]:
            return self._page(properties, seqs=seqs, limit=size, newest_first=newest_first)

        async for stored in _pages(
            page, self._newest_seq, size=PAGE, limit=limit, newest_first=newest_first
        ):
            yield stored

    async def written(self, seqs: range, *, limit: int) -> list[tuple[int, StoredTrajectory]]:
        return await self._page({}, seqs=seqs, limit=limit, newest_first=False)

    async def calls(self, **filters: Unpack[CallFilter]) -> AsyncIterator[StoredCall]:
        trajectory_id, state, limit = checked_call_filters(filters)
        newest_first = bool(filters.get("newest_first"))

        def page(seqs: range | None, size: int) -> Awaitable[list[tuple[int, StoredCall]]]:
            return self._call_page(
                trajectory_id, state, seqs=seqs, limit=size, newest_first=newest_first
            )

        async for stored in _pages(
            page, self._newest_call_seq, size=CALL_PAGE, limit=limit, newest_first=newest_first
        ):
            yield stored


async def _pages(
    page: Callable[[range | None, int], Awaitable[list[tuple[int, T]]]],
    newest_seq: Callable[[], Awaitable[int]],
    *,
    size: int,
    limit: int | None,
    newest_first: bool,
) -> AsyncIterator[T]:
    """At most `limit` rows in the order of seq, page by page. Rows that are written after the first
    page was read are left out."""
    remaining = limit
    seqs: range | None = None
    while remaining != 0 and (seqs is None or seqs):
        length = size if remaining is None else min(size, remaining)
        rows = await page(seqs, length)
        if seqs is None and len(rows) == length and not newest_first:
            seqs = range(1, await newest_seq() + 1)

        for _, row in rows:
            yield row

        if len(rows) < length:
            return

        last = rows[-1][0]
        if newest_first:
            seqs = range(1, last)
        else:
            seqs = range(last + 1, seqs.stop if seqs is not None else last + 1)

        remaining = None if remaining is None else remaining - len(rows)
