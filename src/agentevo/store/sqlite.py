"""The default store: an SQLite file, safe for any number of processes on one machine.

It uses a write-ahead log with `synchronous=NORMAL`. A commit survives the end of every process. A
power failure may undo the newest commits, each as a whole. Readers see a snapshot and never wait
for the writer. Writers wait for each other, inside a process at a lock and between processes at
SQLite's lock. Each takes SQLite's lock at BEGIN, so no transaction fails half-way because it read
before it wrote. A call runs its whole transaction in one visit to a thread. An asynchronous driver
would switch threads about twenty times. The file is a store if it has AgentEvo's `application_id`.
Its `user_version` is the version of the schema.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, Unpack, cast
from urllib.parse import quote

from sqlalchemy import CursorResult, Engine, Executable, create_engine, event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import ConnectionPoolEntry

from agentevo.errors import NoStoreError, StoreError, UnusableStoreError
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.progress import bar
from agentevo.store.clock import Clock, MachineClock, Now
from agentevo.store.migrations import migrations
from agentevo.store.opening import StoreOptions, older_schema, stores
from agentevo.store.sql import SQLRows, SQLStore
from agentevo.store.tables import SCHEMA_VERSION, metadata
from agentevo.store.transactions import AWAY_S, Role, T, Work

APPLICATION_ID = 0x41676576  # "Agev"
THREADS = 8
"""The number of calls of a store object that run at the same time. Only one of them may write."""

_SETTINGS = (
    "page_size=16384",
    "foreign_keys=ON",
    "synchronous=NORMAL",
    "wal_autocheckpoint=1000",
    "journal_size_limit=67108864",
)
"""Settings of every connection. Large pages halve the time of a bulk write, because a turn's blobs
have kilobytes. The page size (in bytes) is fixed when the file is created."""
_SHARES = {
    "tasks": {
        "sqlite_autoindex_tasks_1": "1",
        "tasks_to_lease": "300000 1000 1",
        "tasks_by_state": "300000 1",
        "tasks_by_expiry": "300000 1",
        "tasks_by_start": "300000 1",
    },
    "trajectories": {
        "sqlite_autoindex_trajectories_1": "1",
        "trajectories_by_group": "8 1",
        "trajectories_by_task": "16 1",
        "trajectories_by_trained_step": "250 1",
        "trajectories_by_step": "500 1",
        "trajectories_by_status": "50000 1",
        "trajectories_by_place": "100000 50000 1 1",
        "trajectories_by_state": "100000 1",
        "trajectories_by_split": "500000 1",
    },
    "calls": {"sqlite_autoindex_calls_1": "10 1", "calls_by_seen": "100"},
    "images": {"sqlite_autoindex_images_1": "1"},
    "image_uses": {"sqlite_autoindex_image_uses_1": "500000 10 1", "image_uses_by_image": "100"},
}
"""Maps an index to the number of rows, of a million, that share its first column, its first two
columns, and so on."""
_STEPS_BETWEEN_CHECKS = 100_000
"""The number of instructions of SQLite's virtual machine between two checks of the clock (some
milliseconds)."""
_SHARED_MEMORY_ERRORS = ("SQLITE_READONLY", "SQLITE_CANTOPEN")
"""SQLite's error codes if it can't create the files that readers of a write-ahead log share."""
_PAUSE_S = 0.02
_DEADLINE_SHARE = 0.9
"""The share of a deadline after which SQLite stops by itself."""
_URL_PREFIX = "sqlite:///"


class _Limit:
    """The time at which the running statement of a call is stopped, on the clock of
    `time.monotonic`."""

    def __init__(self, stop_at: float) -> None:
        self.stop_at = stop_at


class _SqliteConnection:
    """A blocking connection with the methods of an asynchronous one. These never wait, so `_drive`
    can run coroutines that await only them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    async def scalar(self, statement: Executable, parameters: Any = None) -> Any:
        return self._connection.scalar(statement, parameters)

    async def exec_driver_sql(self, statement: str, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.exec_driver_sql(statement, parameters)

    async def run_sync(self, call: Callable[[Connection], T]) -> T:
        return call(self._connection)


def _drive(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    work.close()
    raise RuntimeError("a transaction on SQLite awaited something other than its connection")


class SQLiteStore(SQLStore):
    """`Store` describes the guarantees of the methods. `SQLiteStore.open` and `open_store` create a
    store object."""

    def __init__(self, path: Path, **options: Unpack[StoreOptions]) -> None:
        """The file has been checked. `options` are those of `Store`."""
        super().__init__(str(path), **options)
        self.path = path
        self._local_clock: Clock = self._clock or MachineClock()
        self._engine = _engine(path, self._timeout_s, "ro" if self._read_only else "rwc")
        self._is_immutable = False
        """Whether the file is opened as a file that no process writes to."""
        self._copy: TemporaryDirectory[str] | None = None
        """The folder with the copy that is read, if the file itself is not read."""
        self._writer = asyncio.Lock()
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="agentevo-store")

    @classmethod
    async def open(cls, url: str, *, create: bool = True, **options: Unpack[StoreOptions]) -> Self:
        """Opens `sqlite:///PATH`. Creates the file and its folder if needed, unless `create` is
        false. Raises StoreError for a path with other content than an AgentEvo store, or with a
        store of a newer schema. Such a file stays unchanged. Migrates a store of an older schema,
        unless `read_only`. With `read_only`, opens the file with mode=ro. On a read-only medium,
        SQLite can't create the files that readers of a write-ahead log share. There, opens the file
        as one that no process writes to. If a killed writer has left a log, copies both to a
        temporary folder and reads the copy.
        """
        path = _path_of(url)
        _check_file(path, create=create)

        store = cls(path, **options)
        try:
            if store._read_only:
                await store._check_for_reading()
            else:
                await store._run(
                    "open",
                    lambda rows: _check_or_make_schema(rows.connection, path, create=create),
                    "worker",
                )
                await store._use_write_ahead_log()
        except BaseException as error:
            await store.close()
            if _is_no_database(error):
                raise UnusableStoreError(
                    f"{path} is not a SQLite database: give another path; the file was left as "
                    "it is"
                ) from error
            raise

        return store

    async def _check_for_reading(self) -> None:
        """Checks the schema of a file that is only read."""

        def check(rows: SQLRows) -> Awaitable[None]:
            return _check_schema(rows.connection, self.path)

        try:
            await self._run("open", check)
        except StoreError as error:
            if not _sqlite_name(error).startswith(_SHARED_MEMORY_ERRORS):
                raise
            if self._log_bytes():  # the log of a writer that was killed: only SQLite can read it
                await in_thread(self._copy_to_temporary)
            else:
                self._reopen(still=True)
            await self._run("open", check)

    def _copy_to_temporary(self) -> None:
        """From now on, reads a copy in a temporary folder."""
        self._copy = TemporaryDirectory(prefix="agentevo-store-")
        for suffix in ("", "-wal"):
            name = f"{self.path.name}{suffix}"
            shutil.copyfile(self.path.with_name(name), Path(self._copy.name) / name)
        before = self._engine
        self._engine = _engine(Path(self._copy.name) / self.path.name, self._timeout_s, "ro")
        before.dispose()

    def _log_bytes(self) -> int:
        """The size of the write-ahead log in bytes: above 0 while a process writes."""
        try:
            return self.path.with_name(f"{self.path.name}-wal").stat().st_size
        except OSError:
            return 0

    def _reopen(self, *, still: bool) -> None:
        before = self._engine
        self._is_immutable = still
        self._engine = _engine(self.path, self._timeout_s, "still" if still else "ro")
        before.dispose()

    async def close(self) -> None:
        async with self._deadline("close"):
            await in_thread(self._threads.shutdown)
            self._engine.dispose()
            if self._copy is not None:
                self._copy.cleanup()

    async def _transact(self, work: Work[T], role: Role) -> T:
        """Runs the whole transaction in one thread. If the call is cancelled or late, its running
        statement stops (see `_engine`), and the transaction is not committed."""
        if self._is_immutable and self._log_bytes():
            self._reopen(still=False)  # a process writes to the file after all

        write = role != "reader"
        limit = _Limit(time.monotonic() + _DEADLINE_SHARE * self._timeout_s)
        engine = self._engine.execution_options(write=write, limit=limit)

        def transaction() -> T:
            with engine.begin() as connection:
                rows = SQLRows(cast(AsyncConnection, _SqliteConnection(connection)), self._now)
                result = _drive(cast(Coroutine[Any, Any, T], work(rows)))
                if time.monotonic() > limit.stop_at:
                    raise TimeoutError  # the caller already has an error

                return result

        async with self._writer if write else nullcontext():
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, transaction)
            except asyncio.CancelledError:
                limit.stop_at = -math.inf
                raise

    async def _now(self, connection: AsyncConnection) -> Now:
        return self._local_clock.now()

    def _is_late(self, error: BaseException) -> bool:
        return any(
            word in str(getattr(error, "orig", error)) for word in ("locked", "busy", "interrupted")
        )

    def _is_unreachable(self, error: BaseException) -> bool:
        return any(
            words in str(getattr(error, "orig", error))
            for words in ("unable to open", "disk I/O error", "disk is full")
        )

    def _is_damaged(self, error: BaseException) -> bool:
        if isinstance(error, UnicodeDecodeError):  # in SQLite's message about a damaged schema
            return True

        raised = getattr(error, "orig", None)
        if str(raised).startswith("Could not decode to UTF-8"):  # Python's message, without a name
            return True

        name = str(getattr(raised, "sqlite_errorname", None))
        return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")) or (
            # Raised by statements of this package: the schema is no longer a store's.
            name == "SQLITE_ERROR"
        )

    async def _use_write_ahead_log(self) -> None:
        """Sets the journal mode. Only a change of the mode takes a lock, and SQLite ignores
        busy_timeout for it. So if processes open a file together, those without the lock retry."""
        ends = time.monotonic() + self._away_s
        async with self._deadline("switch to a write-ahead log"):
            while True:
                try:
                    await self._execute_alone("PRAGMA journal_mode=WAL")
                    return
                except OperationalError as error:
                    if "locked" not in str(error.orig) or time.monotonic() > ends:
                        raise
                await asyncio.sleep(_PAUSE_S)

    async def _execute_alone(self, statement: str) -> None:
        """Runs a statement outside of any transaction."""

        def call() -> None:
            with self._engine.execution_options(autocommit=True).connect() as connection:
                connection.exec_driver_sql(statement)

        await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def size_bytes(self) -> int:
        files = [
            self.path,
            *(self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")),
        ]
        return sum(file.stat().st_size for file in files if file.exists())

    async def _vacuum(self) -> None:
        async with self._deadline("gc"), self._writer:
            await self._execute_alone("VACUUM")
            await self._execute_alone("PRAGMA wal_checkpoint(TRUNCATE)")


def _path_of(url: str) -> Path:
    if not url.startswith(_URL_PREFIX) or url.removeprefix(_URL_PREFIX) in ("", ":memory:"):
        raise UnusableStoreError(
            f"{url!r} has no path of an SQLite file: write sqlite:///relative/path or "
            "sqlite:////absolute/path"
        )
    return Path(url.removeprefix(_URL_PREFIX)).expanduser().absolute()


def _check_file(path: Path, *, create: bool) -> None:
    """Refuses a path that can't be a database's. Creates the folder of a new database.

    Only SQLite opens the file itself. If other code in this process closed the file, the process
    would lose its POSIX locks on it. Another process that then closes the store would delete the
    write-ahead log while others write (sqlite.org/howtocorrupt.html, 2.2)."""
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise UnusableStoreError(f"{path} is a device, pipe or socket: give another path")

        if path.is_dir():
            raise UnusableStoreError(
                f"{path} is a folder: give the path of the store's file in it, for example "
                f"{path / 'store.sqlite'}"
            )

        if not path.exists():
            if not create:
                raise NoStoreError(f"no store at {path}: check the path")
            path.parent.mkdir(parents=True, exist_ok=True)
            return

        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UnusableStoreError(
            f"the store {path} can't be opened: {error.strerror or error}"
        ) from error


def _sqlite_name(error: BaseException) -> str:
    """SQLite's name of the error that caused the error."""
    raised = getattr(error.__cause__, "orig", None)
    return str(getattr(raised, "sqlite_errorname", None))


def _is_no_database(error: BaseException) -> bool:
    """Whether SQLite reports that the file is not a database."""
    return _sqlite_name(error) == "SQLITE_NOTADB"


Mode = Literal["rwc", "ro", "still"]
"""How a file is opened: for writing, for reading, or for reading a file that no process writes
to."""


def _connect(path: Path, mode: Mode) -> sqlite3.Connection:
    words = "mode=ro&immutable=1" if mode == "still" else f"mode={mode}"
    return sqlite3.connect(f"file:{quote(str(path))}?{words}", uri=True, check_same_thread=False)


def _engine(path: Path, timeout_s: float, mode: Mode = "rwc") -> Engine:
    """SQLite's thread stops by itself, a little before the caller stops waiting for it."""
    busy_ms = int(_DEADLINE_SHARE * min(timeout_s, AWAY_S) * 1000)
    # There is no rollback when a connection returns to the pool, because `begin()` has always ended
    # its transaction by then.
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=partial(_connect, path, mode),
        pool_size=THREADS,
        pool_reset_on_return=None,
    )
    settings = _SETTINGS if mode == "rwc" else ("query_only=ON",)

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        def is_late() -> bool:
            return bool(time.monotonic() > record.info["limit"].stop_at)

        connection.isolation_level = None  # the listener below sends BEGIN
        record.info["limit"] = _Limit(math.inf)

        connection.set_progress_handler(is_late, _STEPS_BETWEEN_CHECKS)
        for setting in (f"busy_timeout={busy_ms}", *settings):
            connection.execute(f"PRAGMA {setting}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.info["limit"] = options.get("limit") or _Limit(
            time.monotonic() + _DEADLINE_SHARE * timeout_s
        )
        if not options.get("autocommit"):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("write") else "BEGIN")

    return engine


async def _schema_of(connection: AsyncConnection, path: Path) -> tuple[int, int]:
    """The file's (application, version). Raises UnusableStoreError for a schema of a newer
    AgentEvo."""
    application = (await connection.exec_driver_sql("PRAGMA application_id")).scalar_one()
    version = (await connection.exec_driver_sql("PRAGMA user_version")).scalar_one()
    if application == APPLICATION_ID and version > SCHEMA_VERSION:
        raise UnusableStoreError(
            f"{path} has the schema {version} of a newer AgentEvo, this one knows up to "
            f"{SCHEMA_VERSION}: upgrade with "
            "pip install -U agentevo; the file was left as it is"
        )

    return application, version


def _foreign_file_error(path: Path) -> UnusableStoreError:
    return UnusableStoreError(
        f"{path} is a SQLite database but not an AgentEvo store: give another path; the file "
        "was left as it is"
    )


async def _check_schema(connection: AsyncConnection, path: Path) -> None:
    application, version = await _schema_of(connection, path)
    if application != APPLICATION_ID:
        raise _foreign_file_error(path)
    if version < SCHEMA_VERSION:
        raise older_schema(str(path), version)


async def _check_or_make_schema(connection: AsyncConnection, path: Path, *, create: bool) -> None:
    application, version = await _schema_of(connection, path)
    empty = not (
        await connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    ).scalar_one()
    if application == APPLICATION_ID:
        for migrate in migrations("sqlite", version, str(path)):
            with bar("store: new schema"):
                await migrate(connection)
        if version < SCHEMA_VERSION:
            await _set_index_statistics(connection)
            await connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
        return

    if application or version or not empty or not create:
        raise _foreign_file_error(path)

    await connection.run_sync(metadata.create_all)
    await _set_index_statistics(connection)
    await connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    await connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")


async def _set_index_statistics(connection: AsyncConnection) -> None:
    """Gives SQLite an estimate of how many rows share a value in a large store. Without it, SQLite
    considers every index equally good, and searches for a group among all ready rows. See "manual
    control of query plans" in SQLite's documentation of `sqlite_stat1`."""
    await connection.exec_driver_sql("ANALYZE")  # creates the table sqlite_stat1
    await connection.exec_driver_sql("DELETE FROM sqlite_stat1")
    rows = [
        (table, index, f"1000000 {shares}")
        for table, indexes in _SHARES.items()
        for index, shares in indexes.items()
    ]
    await connection.exec_driver_sql("INSERT INTO sqlite_stat1 VALUES (?, ?, ?)", rows)
    await connection.exec_driver_sql("ANALYZE sqlite_schema")  # makes SQLite read it


stores.register("sqlite")(SQLiteStore.open)
