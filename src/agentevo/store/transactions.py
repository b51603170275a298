"""How every database runs a transaction: within the call's deadline, again while its errors are
transient, with the driver's errors converted to AgentEvo's."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, Self, TypeVar

from agentevo.errors import (
    SHOWN,
    DeadlineExceededError,
    StoreError,
    StoreUnavailableError,
    UnusableStoreError,
    storable,
)
from agentevo.store.clock import Clock
from agentevo.store.records import RETRIES, RetryPolicy

AWAY_S = 60.0
"""The maximum time in seconds that a call waits for a database that can't be reached or for another
process's lock. The call's deadline may be longer, because its work may take long."""
_PAUSE_S = 0.02
"""The shortest time between two tries of a transaction, in seconds."""

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""What a transaction does with its `Rows`."""
Piece = Callable[[Any, Any], Awaitable[tuple[int, Any]]]
"""Deletes or changes some rows, after a place in their order (at first None). Returns their number,
and the place after which to continue, or None at the end."""
Role = Literal["reader", "worker", "trainer", "alone"]
"""The role in which a call accesses the store. A reader changes nothing. A call writes as one of
any number of workers, as the single trainer next to them, or alone."""


class Transactions(ABC):
    """The transactions of a store. A backend defines how it runs one, its `Rows`, and what the
    errors of its driver mean."""

    _errors: tuple[type[Exception], ...]
    """The errors of the driver."""

    def __init__(
        self,
        where: str,
        *,
        timeout_s: float = 60.0,
        retries: RetryPolicy = RETRIES,
        clock: Clock | None = None,
        read_only: bool = False,
    ) -> None:
        self.where = where
        """The name of the store in messages."""
        self._timeout_s = timeout_s
        self._away_s = min(timeout_s, AWAY_S)
        self._retries = retries
        self._clock = clock
        self._read_only = read_only
        self._is_open = False

    @abstractmethod
    async def _transact(self, work: Work[T], role: Role) -> T:
        """Runs `work` in a transaction, which takes effect completely or not at all."""

    @abstractmethod
    async def _run_pieces(self, what: str, pieces: Mapping[str, Piece]) -> dict[str, int]:
        """Runs each piece until its end, and returns the sums of the numbers of rows."""

    @abstractmethod
    async def _vacuum(self) -> None:
        """Returns the space of deleted rows to the disk, if the database can."""

    def _is_late(self, error: BaseException) -> bool:
        """Whether the database reports that the call took too long."""
        return False

    @abstractmethod
    def _is_unreachable(self, error: BaseException) -> bool:
        """Whether the database can't be reached now."""

    def _is_damaged(self, error: BaseException) -> bool:
        """Whether the database reports that it is damaged."""
        return False

    def _is_transient(self, error: BaseException) -> bool:
        """Whether the same call may succeed soon."""
        return False

    async def _run(self, what: str, work: Work[T], role: Role = "reader") -> T:
        """Runs a transaction within the deadline. `what` names the call in messages."""
        if role != "reader":
            self._check_writable(what)
        return await self._retry(what, lambda: self._transact(work, role))

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise StoreError(f"{what}: {self.where} was opened for reading only")

    async def _retry(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Repeats `work` while its errors are transient, until the deadline and for at most AWAY_S
        seconds."""
        first_error_at: float | None = None
        async with self._deadline(what) as retried_errors:
            while True:
                try:
                    return await work()
                except self._errors as error:
                    now = time.monotonic()
                    first_error_at = now if first_error_at is None else first_error_at
                    if not self._is_transient(error) or now - first_error_at > self._away_s:
                        raise
                    retried_errors[:] = [error]

                await asyncio.sleep(_PAUSE_S * (1.0 + random.random()))

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[list[Exception]]:
        """Converts the database's failures to AgentEvo's errors. No other code does. Yields a list
        for the failures that were retried."""
        retried_errors: list[Exception] = []
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                yield retried_errors
        except TimeoutError as error:
            if retried_errors and self._is_unreachable(retried_errors[-1]):
                raise self._unavailable(what, retried_errors[-1]) from retried_errors[-1]
            raise self._timeout_error(what, started_at) from error
        except self._errors as error:
            if self._is_late(error):
                raise self._timeout_error(what, started_at) from error
            if self._is_unreachable(error):
                raise self._unavailable(what, error) from error

            reason = getattr(error, "orig", None) or error
            if self._is_damaged(error):
                raise UnusableStoreError(
                    f"the store {self.where} is damaged ({what}: {storable(str(reason), SHOWN)}): "
                    "restore it from a copy"
                ) from error

            raise StoreError(f"store {self.where}: {what}: {reason}") from error

    def _unavailable(self, what: str, error: BaseException) -> StoreUnavailableError:
        reason = getattr(error, "orig", None) or error
        return StoreUnavailableError(
            f"store {self.where}: {what}: {reason}: the database can't be used now; you can safely "
            f"repeat the call"
        )

    def _timeout_error(self, what: str, started_at: float) -> DeadlineExceededError:
        waited_s = time.monotonic() - started_at
        limit_s = self._away_s if waited_s < 2 * self._away_s else self._timeout_s
        return DeadlineExceededError(
            f"store {self.where}: {what}: no answer within {limit_s:g} s; another process may "
            f"hold the write lock, the disk may be slow, or the server down; you can safely "
            f"repeat the call"
        )

    async def _pages(
        self,
        table: str,
        page: Callable[[range | None, int], Awaitable[list[tuple[int, T]]]],
        size: int,
        limit: int | None,
        newest_first: bool,
    ) -> AsyncIterator[T]:
        """At most `limit` rows in the order of seq, page by page. Rows that are written after the
        first page was read are left out."""
        remaining = limit
        seqs: range | None = None
        while remaining != 0 and (seqs is None or seqs):
            length = size if remaining is None else min(size, remaining)
            rows = await page(seqs, length)
            if seqs is None and len(rows) == length and not newest_first:
                newest = await self._run(table, lambda rows: rows.newest_seq(table))
                seqs = range(1, newest + 1)

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

    @abstractmethod
    async def close(self) -> None:
        """Closes connections and files. The object can't be used afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
