"""The default store: one SQLite file, safe for any number of processes on one machine.

Write-ahead log, `synchronous=NORMAL`: a commit survives the death of every process; a power cut may undo the newest commits, whole, but
never tears one. Readers see a snapshot and never wait for the writer. Writers queue: inside a process at a lock, between processes at
SQLite's, which each takes at BEGIN, so that no transaction fails half-way for having read before it wrote.

Every call has one deadline for its whole work. The file is ours if it carries our `application_id`; `user_version` is the schema's version.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from agentevo.errors import DeadlineExceededError, StoreError
from agentevo.store import facts, ledger
from agentevo.store.codec import JSON, encode_task, encode_trajectories
from agentevo.store.store import (
    Lease,
    Split,
    StepRecord,
    StoredTrajectory,
    TrajectoryFilter,
    TrajectorySummary,
    checked_filters,
    stores,
)
from agentevo.store.tables import SCHEMA_VERSION, metadata
from agentevo.types import Task, Trajectory

APPLICATION_ID = 0x41676576  # "Agev"
PAGE = 64
"""Trajectories read with one query while streaming."""

_SETTINGS = ("page_size=16384", "foreign_keys=ON", "synchronous=NORMAL", "wal_autocheckpoint=1000", "journal_size_limit=67108864")
"""Of every connection. Large pages (in bytes, fixed when the file is made) halve the time of a bulk write: a turn's blobs are kilobytes."""
_STEPS_BETWEEN_LOOKS = 100_000
"""Instructions of SQLite's virtual machine (some milliseconds) between two looks at the clock."""
_PAUSE_S = 0.02
_URL_PREFIX = "sqlite:///"
_MAGIC = b"SQLite format 3\0"


class SQLiteStore:
    """See `Store` for what the methods promise; make one with `SQLiteStore.open` or `open_store`."""

    def __init__(self, path: Path, engine: AsyncEngine, *, timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        """`engine` comes from `_engine`, and the file has been checked; `clock` gives Unix time in seconds."""
        self.path = path
        self._engine = engine
        self._timeout_s = timeout_s
        self._clock = clock
        self._writer = asyncio.Lock()

    @classmethod
    async def open(cls, url: str, *, timeout_s: float = 60.0, create: bool = True) -> Self:
        """Opens `sqlite:///PATH`. Makes the file and its folder if need be, unless `create` is false.

        Raises StoreError for a path that holds anything but an AgentEvo store, or one of a newer schema; such a file is left as it was.
        """
        path = _path_of(url)
        _check_file(path, create=create)
        engine = _engine(path, timeout_s)
        store = cls(path, engine, timeout_s=timeout_s)
        try:
            async with store._transaction("open", write=True) as connection:
                await _check_or_make_schema(connection, path, create=create)
            await store._use_write_ahead_log()
        except BaseException:
            await engine.dispose()
            raise
        return store

    async def close(self) -> None:
        async with self._deadline("close"):
            await self._engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        """The one place where the database's failures become ours."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise self._too_late(what) from error
        except DBAPIError as error:
            if any(word in str(error.orig) for word in ("locked", "busy", "interrupted")):
                raise self._too_late(what) from error
            raise StoreError(f"store {self.path}: {what}: {error.orig}") from error

    def _too_late(self, what: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"store {self.path}: {what}: no answer within {self._timeout_s:g} s; another process may hold the write lock, or the disk "
            "is slow: calling again is harmless"
        )

    @asynccontextmanager
    async def _transaction(self, what: str, *, write: bool = False) -> AsyncIterator[AsyncConnection]:
        engine = self._engine.execution_options(write=write)
        async with self._deadline(what), self._writer if write else nullcontext(), engine.begin() as connection:
            yield connection

    async def _use_write_ahead_log(self) -> None:
        """Only a change takes a lock, and for it SQLite ignores busy_timeout: of processes that open one together, the losers retry."""
        engine = self._engine.execution_options(autocommit=True)
        async with self._deadline("switch to a write-ahead log"):
            while True:
                try:
                    async with engine.connect() as connection:
                        await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                    return
                except OperationalError as error:
                    if "locked" not in str(error.orig):
                        raise
                await asyncio.sleep(_PAUSE_S)

    async def add_tasks(self, tasks: Iterable[Task]) -> int:
        encoded = [encode_task(task) for task in tasks]
        async with self._transaction("add_tasks", write=True) as connection:
            return await facts.insert_tasks(connection, encoded)

    async def task(self, task_id: str) -> Task:
        async with self._transaction("task") as connection:
            return await facts.read_task(connection, task_id)

    async def lease_task(self, worker: str, *, lease_s: float) -> Lease | None:
        async with self._transaction("lease_task", write=True) as connection:
            return await ledger.lease_task(connection, worker, now=self._clock(), lease_s=lease_s)

    async def complete_task(self, lease: Lease) -> None:
        async with self._transaction("complete_task", write=True) as connection:
            await ledger.finish_task(connection, lease, error=None)

    async def fail_task(self, lease: Lease, error: str) -> None:
        async with self._transaction("fail_task", write=True) as connection:
            await ledger.finish_task(connection, lease, error=error)

    async def write_trajectories(self, trajectories: Iterable[Trajectory], *, split: Split, step: int, lease: Lease | None = None) -> int:
        encoded = await asyncio.to_thread(encode_trajectories, list(trajectories), split, step)
        async with self._transaction("write_trajectories", write=True) as connection:
            if lease is not None:
                await ledger.finish_task(connection, lease, error=None)
            return await facts.insert_trajectories(connection, encoded, self._clock())

    async def reserve(self, ids: Iterable[str], step: int) -> int:
        async with self._transaction("reserve", write=True) as connection:
            return await ledger.reserve(connection, ids, step)

    async def commit_step(self, step: int, record: dict[str, Any], *, ids: Iterable[str] | None = None) -> int:
        try:
            text = JSON.encode(record).decode()
        except (TypeError, ValueError) as error:
            raise StoreError(f"the record of step {step} can't be stored: {error}; use plain JSON values") from error
        async with self._transaction("commit_step", write=True) as connection:
            return await ledger.commit_step(connection, step, text, ids=ids, now=self._clock())

    async def release(self, step: int | None = None) -> int:
        async with self._transaction("release", write=True) as connection:
            return await ledger.release(connection, step)

    async def drop(self, ids: Iterable[str], reason: str) -> int:
        async with self._transaction("drop", write=True) as connection:
            return await ledger.drop(connection, ids, reason)

    async def rewind(self, step: int) -> int:
        async with self._transaction("rewind", write=True) as connection:
            return await ledger.rewind(connection, step)

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        async with self._transaction("trajectory") as connection:
            page = await facts.read_page(connection, {"id": trajectory_id}, seqs=None, limit=1, newest_first=False)
        if not page:
            raise StoreError(f"no trajectory {trajectory_id!r} in {self.path}")
        return page[0][1].trajectory

    async def trajectories(self, **filters: Unpack[TrajectoryFilter]) -> AsyncIterator[StoredTrajectory]:
        properties, left, newest_first = checked_filters(filters)
        async with self._transaction("trajectories") as connection:
            seqs = range(1, await facts.newest_seq(connection) + 1)
        while seqs and left != 0:
            size = PAGE if left is None else min(PAGE, left)
            async with self._transaction("trajectories") as connection:
                page = await facts.read_page(connection, properties, seqs=seqs, limit=size, newest_first=newest_first)
            for _, stored in page:
                yield stored
            if len(page) < size:
                return
            last = page[-1][0]
            seqs = range(seqs.start, last) if newest_first else range(last + 1, seqs.stop)
            left = None if left is None else left - len(page)

    async def summaries(self, **filters: Unpack[TrajectoryFilter]) -> list[TrajectorySummary]:
        properties, limit, newest_first = checked_filters(filters)
        async with self._transaction("summaries") as connection:
            return await facts.read_summaries(connection, properties, limit=limit, newest_first=newest_first)

    async def steps(self) -> list[StepRecord]:
        async with self._transaction("steps") as connection:
            return await ledger.read_steps(connection, last_only=False)

    async def last_step(self) -> StepRecord | None:
        async with self._transaction("last_step") as connection:
            return next(iter(await ledger.read_steps(connection, last_only=True)), None)

    async def counts(self) -> dict[str, int]:
        async with self._transaction("counts") as connection:
            return await facts.count(connection)


def _path_of(url: str) -> Path:
    if not url.startswith(_URL_PREFIX) or url.removeprefix(_URL_PREFIX) in ("", ":memory:"):
        raise StoreError(f"{url!r} names no SQLite file: write sqlite:///relative/path or sqlite:////absolute/path")
    return Path(url.removeprefix(_URL_PREFIX)).expanduser().absolute()


def _check_file(path: Path, *, create: bool) -> None:
    """Refuses, without opening it as a database, a path that can't be one; makes the folder of a new one."""
    try:
        if path.is_dir():
            raise StoreError(f"{path} is a folder: give the path of the store's file in it, for example {path / 'store.sqlite'}")
        if not path.exists():
            if not create:
                raise StoreError(f"no store at {path}: check the path")
            path.parent.mkdir(parents=True, exist_ok=True)
            return
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise StoreError(f"the store {path} can't be opened: {error.strerror or error}") from error
    if head and head != _MAGIC:
        raise StoreError(f"{path} is not a SQLite database: give another path; the file was left as it is")


def _engine(path: Path, timeout_s: float) -> AsyncEngine:
    patience_s = 0.9 * timeout_s  # SQLite's thread gives up by itself, a little before the caller stops waiting for it
    # No rollback when a connection goes back to the pool: `begin()` has always ended its transaction by then.
    engine = create_async_engine(URL.create("sqlite+aiosqlite", database=str(path)), pool_reset_on_return=None)

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        def is_late() -> bool:
            return bool(time.monotonic() > record.info["stop_at"])

        connection.isolation_level = None  # we say BEGIN ourselves, below
        record.info["stop_at"] = math.inf
        connection.run_async(lambda raw: raw.set_progress_handler(is_late, _STEPS_BETWEEN_LOOKS))
        cursor = connection.cursor()
        for setting in (f"busy_timeout={int(patience_s * 1000)}", *_SETTINGS):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.info["stop_at"] = time.monotonic() + patience_s
        if not options.get("autocommit"):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("write") else "BEGIN")

    return engine


async def _check_or_make_schema(connection: AsyncConnection, path: Path, *, create: bool) -> None:
    application = (await connection.exec_driver_sql("PRAGMA application_id")).scalar_one()
    version = (await connection.exec_driver_sql("PRAGMA user_version")).scalar_one()
    empty = not (await connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")).scalar_one()
    if application == APPLICATION_ID:
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has the schema {version} of a newer AgentEvo, this one knows up to {SCHEMA_VERSION}: upgrade with "
                "pip install -U agentevo; the file was left as it is"
            )
        return
    if application or version or not empty or not create:
        raise StoreError(f"{path} is a SQLite database but not an AgentEvo store: give another path; the file was left as it is")
    await connection.run_sync(metadata.create_all)
    await connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    await connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")


stores.register("sqlite")(SQLiteStore.open)
