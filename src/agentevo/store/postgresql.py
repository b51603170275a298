"""A store in PostgreSQL, for workers on many machines:
`postgresql://USER@HOST/DATABASE?schema=NAME` (default `agentevo`).

Each store is a schema, so a database can hold many stores. Transactions run at READ COMMITTED and
lock the rows that they change:

    workers    a shared lock of the whole store; the rows of the tasks that they lease or finish,
               with SKIP LOCKED when leasing
    trainer    the same, and one exclusive lock: reserve, commit, release and drop happen one after
               the other
    alone      the whole store exclusively: rewind, gc, import, migrations

Reads see one snapshot (REPEATABLE READ, read only). Deadlocks, clashes of two inserts and lost
connections are transient. The call is retried until its deadline, for at most AWAY_S seconds, so
clients wait while the server restarts. The server's configuration decides how durable commits are
(`synchronous_commit`). The server's clock times leases.
"""

from __future__ import annotations

import re
from typing import Any, Self, Unpack

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from agentevo.errors import NoStoreError, UnusableStoreError
from agentevo.runtime.credentials import without_password
from agentevo.runtime.extras import load_extra
from agentevo.runtime.progress import bar
from agentevo.store.clock import Now
from agentevo.store.migrations import migrations
from agentevo.store.opening import StoreOptions, older_schema, stores
from agentevo.store.sql import SQLRows, SQLStore
from agentevo.store.store import TABLES
from agentevo.store.tables import SCHEMA_VERSION, metadata
from agentevo.store.transactions import Role, T, Work

DEFAULT_SCHEMA = "agentevo"
POOL_SIZE = 8
"""The maximum number of connections of a store object."""

_TRANSIENT_STATES = ("08", "40001", "40P01", "23505", "53300", "57P0")
"""The beginnings of SQLSTATEs for transient errors: lost connections, serialization, deadlock, a
clash of inserts, too many clients, a server that stops."""
_UNREACHABLE_STATES = ("08", "53300", "57P0")
"""The beginnings of SQLSTATEs that mean that the server can't be reached."""
_TIMEOUT_STATES = ("57014", "25P03", "55P03")
_KEEPALIVES = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "35000",
}
"""Keepalive settings of the server. If a client's machine or network fails, the client loses its
session and locks after 35 seconds. The settings have no effect on a unix socket."""
_OPTIONS = ("host", "port", "ssl", "sslmode")


class PostgreSQLStore(SQLStore):
    """`Store` describes the guarantees of the methods. `PostgreSQLStore.open` and `open_store`
    create a store object."""

    def __init__(self, url: URL, schema: str, **options: Unpack[StoreOptions]) -> None:
        """`options` are those of `Store`."""
        super().__init__(url.render_as_string(), **options)
        self.schema = schema
        timeout_s = self._timeout_s
        settings = {
            "search_path": schema,
            "lock_timeout": str(int(900 * self._away_s)),
            "statement_timeout": str(
                int(900 * timeout_s)
            ),  # in milliseconds, a little less than the time that the caller waits
            "idle_in_transaction_session_timeout": str(int(2000 * timeout_s)),
            "application_name": "agentevo",
            **_KEEPALIVES,
        } | ({"default_transaction_read_only": "on"} if self._read_only else {})
        self._engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg"),
            connect_args={"server_settings": settings, "timeout": self._away_s},
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=timeout_s,
        )

    @classmethod
    async def open(cls, url: str, *, create: bool = True, **options: Unpack[StoreOptions]) -> Self:
        """Opens a schema of an existing database. Creates the schema and tables if needed, unless
        `create` is false. Raises StoreError for a schema with other tables, or with the tables of a
        newer AgentEvo, and leaves the schema unchanged. `read_only`: every transaction is read only
        and takes no lock.
        """
        address, schema = _parse(url)
        load_extra("asyncpg", "postgresql", f"the store {address.render_as_string()}")

        store = cls(address, schema, **options)
        try:
            await store._run(
                "open",
                lambda rows: _check_or_make_schema(rows.connection, store, create=create),
                "reader" if store._read_only else "alone",
            )
        except BaseException:
            await store._engine.dispose()
            raise

        store._is_open = True
        return store

    async def close(self) -> None:
        async with self._deadline("close"):
            await self._engine.dispose()

    async def _transact(self, work: Work[T], role: Role) -> T:
        options: dict[str, Any] = (
            {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            if role == "reader"
            else {}
        )
        async with self._engine.execution_options(**options).begin() as connection:
            if role != "reader":
                await self._lock(connection, role)
            return await work(SQLRows(connection, self._now))

    async def _lock(self, connection: AsyncConnection, role: Role) -> None:
        function = "pg_advisory_xact_lock" if role == "alone" else "pg_advisory_xact_lock_shared"
        statement = f"SELECT {function}(hashtext('agentevo'), hashtext(:schema))"
        if role == "trainer":
            statement += ", pg_advisory_xact_lock(hashtext('agentevo trainer'), hashtext(:schema))"
        await connection.execute(text(statement), {"schema": self.schema})

    async def _now(self, connection: AsyncConnection) -> Now:
        if self._clock is not None:
            return self._clock.now()
        seconds = float(
            await connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())::float8"))
            or 0.0
        )
        return Now(seconds, seconds)

    def _is_late(self, error: BaseException) -> bool:
        return _sqlstate(error).startswith(_TIMEOUT_STATES)

    def _is_unreachable(self, error: BaseException) -> bool:
        if not isinstance(error, DBAPIError):  # no connection was possible
            return True
        return (
            _sqlstate(error).startswith(_UNREACHABLE_STATES)
            or error.connection_invalidated
            or isinstance(error, InterfaceError)
            or _is_client_broken(error)
        )

    def _is_transient(self, error: BaseException) -> bool:
        if isinstance(error, OSError):  # no connection was possible
            return self._is_open
        if not isinstance(error, DBAPIError):
            return False
        is_lost = error.connection_invalidated or isinstance(error, InterfaceError)
        is_lost = is_lost or _is_client_broken(error)
        return _sqlstate(error).startswith(_TRANSIENT_STATES) or (is_lost and self._is_open)

    async def size_bytes(self) -> int:
        sizes = ", ".join(f"pg_total_relation_size('{name}')::bigint" for name in TABLES)

        async def work(rows: SQLRows) -> int:
            return int(sum((await rows.connection.execute(text(f"SELECT {sizes}"))).one()))

        return await self._run("size_bytes", work)

    async def _vacuum(self) -> None:
        engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        async with self._deadline("gc"), engine.connect() as connection:
            await connection.execute(text(f"VACUUM (ANALYZE) {', '.join(TABLES)}"))


def _is_client_broken(error: DBAPIError) -> bool:
    """Whether the error is asyncpg's "cannot switch to state 11; another operation (2) is in
    progress". asyncpg raises it if the server left the connection half-open."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "InternalClientError":
            return True
        cause = cause.__cause__
    return False


def _parse(url: str) -> tuple[URL, str]:
    """The URL without the parameter `schema`, and that schema."""
    try:
        address = make_url(url)
    except (ArgumentError, ValueError) as error:
        url_without_password = without_password(url)
        raise UnusableStoreError(
            f"{url_without_password!r} is not the URL of a database: write "
            "postgresql://USER@HOST/DATABASE "
            f"({type(error).__name__})"
        ) from None

    schema = address.query.get("schema", DEFAULT_SCHEMA)
    if not address.database:
        raise UnusableStoreError(
            f"{address.render_as_string()!r} names no database: write "
            "postgresql://USER@HOST/DATABASE"
        )

    if address.port is not None and not 0 < address.port < 65536:
        raise UnusableStoreError(
            f"{address.render_as_string()!r} has the port {address.port}: a port is 1 to 65535"
        )

    if not isinstance(schema, str) or not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
        raise UnusableStoreError(
            f"schema={schema!r}: use small letters, digits and _, at most 63 of them"
        )

    if unknown := sorted(set(address.query) - {"schema", *_OPTIONS}):
        raise UnusableStoreError(
            f"{unknown[0]!r} is not an option of a PostgreSQL store: options after the ? are "
            f"schema, "
            f"{', '.join(_OPTIONS)}"
        )

    address = address.difference_update_query(["schema"])
    if ssl_mode := address.query.get("sslmode"):  # asyncpg's option ssl is sslmode in libpq
        address = address.difference_update_query(["sslmode"]).update_query_dict({"ssl": ssl_mode})

    return address, schema


def _sqlstate(error: BaseException) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")


async def _check_or_make_schema(
    connection: AsyncConnection, store: PostgreSQLStore, *, create: bool
) -> None:
    query = "SELECT tablename FROM pg_tables WHERE schemaname = :schema"
    table_names = set((await connection.execute(text(query), {"schema": store.schema})).scalars())
    if "agentevo_store" in table_names:
        version = await connection.scalar(text("SELECT version FROM agentevo_store"))
        if version > SCHEMA_VERSION:
            raise UnusableStoreError(
                f"{store.where}: the schema {store.schema!r} has version {version}, this "
                f"AgentEvo knows {SCHEMA_VERSION}: upgrade with pip install -U agentevo; the "
                "schema was not changed"
            )

        where = f"{store.where}: the schema {store.schema!r}"
        if store._read_only and version < SCHEMA_VERSION:
            raise older_schema(store.where, version)

        for migrate in migrations("postgresql", version, where):
            with bar("store: new schema"):
                await migrate(connection)

        if version < SCHEMA_VERSION:
            await connection.execute(
                text("UPDATE agentevo_store SET version = :version"), {"version": SCHEMA_VERSION}
            )

        return

    if table_names:
        raise UnusableStoreError(
            f"{store.where}: the schema {store.schema!r} has other tables and was not changed: "
            "give another schema with ?schema=NAME"
        )

    if not create:
        raise NoStoreError(f"{store.where}: no store in the schema {store.schema!r}: check the URL")

    await connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {store.schema}"))
    await connection.run_sync(metadata.create_all)
    await connection.execute(text("CREATE TABLE agentevo_store (version integer NOT NULL)"))
    await connection.execute(
        text("INSERT INTO agentevo_store VALUES (:version)"), {"version": SCHEMA_VERSION}
    )


stores.register("postgresql")(PostgreSQLStore.open)
