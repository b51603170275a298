"""Transactions in MongoDB. A call of the store is retried until its deadline while its error is
transient. The database's failures become AgentEvo's errors."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from agentevo.errors import DeadlineExceededError, StoreError, StoreUnavailableError
from agentevo.store.clock import Clock, Now
from agentevo.store.mongo_queries import Document
from agentevo.store.mongo_rows import MongoRows
from agentevo.store.read_only import only_read
from agentevo.store.records import RetryPolicy
from agentevo.store.store import AWAY_S

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient
    from pymongo.errors import PyMongoError

T = TypeVar("T")
Work = Callable[[MongoRows], Awaitable[T]]

READS = frozenset(
    {
        "calls",
        "clock",
        "counts",
        "last_step",
        "num_calls",
        "outstanding",
        "ready_groups",
        "size_bytes",
        "steps",
        "summaries",
        "task",
        "tasks",
        "trajectories",
    }
)
"""The calls that change nothing, by their names in messages."""
_PAUSE_S = 0.01
_LABELS = ("TransientTransactionError", "UnknownTransactionCommitResult")
_DUPLICATE_KEY = 11000


class Transactions:
    """A database, and the transactions that run on it."""

    def __init__(
        self,
        client: AsyncMongoClient[Document],
        name: str,
        *,
        timeout_s: float,
        retries: RetryPolicy,
        clock: Clock | None,
        read_only: bool = False,
    ) -> None:
        self._client = client
        self._read_only = read_only
        self._database = client[name]
        self.where = f"mongodb {name}"
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock
        self._is_open = False

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[list[PyMongoError]]:
        """Converts the database's failures to AgentEvo's errors. No other code does. Yields a list
        for the failures that were retried."""
        from pymongo.errors import ConnectionFailure, PyMongoError

        retried_errors: list[PyMongoError] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                yield retried_errors
        except TimeoutError as error:
            if retried_errors and isinstance(retried_errors[-1], ConnectionFailure):
                raise self._unavailable(what, retried_errors[-1]) from retried_errors[-1]
            raise DeadlineExceededError(
                f"store {self.where}: {what}: no answer within {self._timeout_s:g} s; the server "
                f"may be down or busy; you can safely repeat the call"
            ) from error
        except ConnectionFailure as error:
            raise self._unavailable(what, error) from error
        except PyMongoError as error:
            raise StoreError(f"store {self.where}: {what}: {error}") from error

    def _unavailable(self, what: str, error: BaseException) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"store {self.where}: {what}: {error}: the database can't be used now; you can safely "
            f"repeat the call"
        )

    async def _retry(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Retries `work` while its error is transient, until the deadline and for at most AWAY_S
        seconds."""
        if self._read_only and what not in READS:
            raise only_read(self.where, what)

        from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, PyMongoError

        first: float | None = None
        async with self._deadline(what) as retried_errors:
            while True:
                try:
                    return await work()
                except PyMongoError as error:
                    clash = isinstance(error, BulkWriteError) and any(
                        write_error.get("code") == _DUPLICATE_KEY
                        for write_error in (error.details or {}).get("writeErrors", [])
                    )
                    is_lost = isinstance(error, AutoReconnect) and self._is_open
                    now = time.monotonic()
                    first = now if first is None else first
                    labelled = any(error.has_error_label(label) for label in _LABELS)
                    passes = labelled or clash or is_lost or isinstance(error, DuplicateKeyError)
                    if not passes or now - first > AWAY_S:
                        raise

                    retried_errors[:] = [error]

                await asyncio.sleep(_PAUSE_S * (1.0 + random.random()))

    async def _run(self, what: str, work: Work[T], *, turn: bool = False) -> T:
        """Runs `work` in a transaction. With `turn`, all transactions that take a turn run one
        after the other."""
        from pymongo.read_concern import ReadConcern

        async def transaction() -> T:
            snapshot = ReadConcern("snapshot")
            async with (
                self._client.start_session() as session,
                await session.start_transaction(read_concern=snapshot),
            ):
                rows = MongoRows(self._database, session)
                if turn:
                    await rows.take_turn()
                return await work(rows)

        return await self._retry(what, transaction)

    async def _delete_in_pieces(
        self, piece: Callable[[MongoRows, Any], Awaitable[tuple[int, Any]]], *, turn: bool
    ) -> int:
        """Deletes in several transactions, because a transaction has a limited lifetime. `piece`
        returns the number of rows that it deleted and the row after which to continue, None at the
        end. Returns the sum."""
        done = 0
        after = None

        async def work(rows: MongoRows) -> tuple[int, Any]:
            return await piece(rows, after)

        while True:
            deleted, after = await self._run("gc", work, turn=turn)
            done += deleted
            if after is None:
                return done
            await asyncio.sleep(_PAUSE_S)  # lets a trainer have its turn between two pieces

    async def _now(self) -> Now:
        return await self._retry("clock", self._read_clock)

    async def _read_clock(self) -> Now:
        if self._clock is not None:
            return self._clock.now()
        seconds = (await self._client.admin.command("hello"))["localTime"].timestamp()
        return Now(seconds, seconds)

    async def _reserve_numbers(self, kind: str, count: int) -> int:
        """The first of `count` numbers for new rows. No other caller gets these numbers. It runs
        outside transactions: a gap in the numbers does no harm, but waiting would."""
        if not count:
            return 0

        async def work() -> int:
            document = await self._database["meta"].find_one_and_update(
                {"_id": kind}, {"$inc": {"seq": count}}
            )
            return int(document["seq"]) + 1 if document else 1

        return await self._retry("numbers", work)
