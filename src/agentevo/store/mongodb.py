"""A store in MongoDB, for workers on many machines: `mongodb://USER@HOST/DATABASE?replicaSet=NAME`.
Each store is a database.

The server must be a member of a replica set (a single member is enough) or of a sharded cluster.
Only those have transactions, so all others are refused. Each call is one transaction with snapshot
reads and majority writes. Only leasing changes each document by itself, atomically, so that workers
don't block each other. Conflicts and lost connections are transient: the call is retried until its
deadline. The server's clock times leases.

    tasks, trajectories, calls   a document for a row of tables.py, `_id` being its id
    tokens                       {_id: id of the trajectory, data}
    images                       {_id: the SHA-256, media_type, put_at, data}
    image_uses                   {kind, owner, image}
    steps                        {_id: step, step, record, num_trajectories, committed_at}
    meta                         {_id: "schema", version}, {_id: "trainer", turn}, and
                                 {_id: "tasks", "trajectories" or "calls", seq}

A transaction sees a snapshot. If it writes a document that another transaction has changed since
then, it is retried. If it only reads such a document, it is not retried. So all transactions of a
trainer, and those that need the store alone, write `meta.trainer` and run one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

from agentevo.errors import MissingExtraError, NoStoreError, UnusableStoreError
from agentevo.runtime.credentials import without_password
from agentevo.runtime.event_loop import in_thread
from agentevo.store.clock import CLOCK_TOLERANCE_S, Now
from agentevo.store.codec import decode_lease
from agentevo.store.database_rows import Condition, Operator, Row
from agentevo.store.opening import StoreOptions, older_schema, stores
from agentevo.store.records import Lease
from agentevo.store.rows import Rows, expire_lease
from agentevo.store.store import TABLES, Store
from agentevo.store.transactions import AWAY_S, Piece, Role, T, Work

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient

Document = dict[str, Any]

_OPERATORS: dict[Operator, str] = {
    "=": "$eq",
    "!=": "$ne",
    "<": "$lt",
    "<=": "$lte",
    ">": "$gt",
    ">=": "$gte",
    "in": "$in",
}
SCHEMA_VERSION = 3
"""The version of the documents in this module."""

INDEXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "tasks": (
        ("seq",),
        ("state", "seq"),
        ("state", "not_before", "seq"),
        ("state", "lease_expires_at"),
        ("state", "lease_started_at"),
    ),
    "trajectories": (
        ("seq",),
        *(
            (name, "seq")
            for name in ("step", "trained_step", "split", "state", "status", "task_id", "group_id")
        ),
        ("state", "split", "seq"),
    ),
}
CALL_INDEXES: tuple[tuple[str, ...], ...] = (("seq",), ("trajectory_id", "seq"), ("seen_at",))
IMAGE_INDEXES: tuple[tuple[str, ...], ...] = (("owner", "kind"), ("image",))
_NAMESPACE_EXISTS = 48

_NUMBERED = ("tasks", "trajectories", "calls")
_CALL_FACTS = ("trajectory_id", "parent", "kind", "name", "started_at")
"""What does not change in a call."""
_PAUSE_S = 0.01
_LABELS = ("TransientTransactionError", "UnknownTransactionCommitResult")
_DUPLICATE_KEY = 11000


def _field(table: str, column: str) -> str:
    return "_id" if column == ("step" if table == "steps" else "id") else column


def _filter(table: str, where: Sequence[Condition]) -> Document:
    query: Document = {}
    for column, sign, value in where:
        if sign == "outside":
            query["$or"] = [{column: {"$lt": value[0]}}, {column: {"$gt": value[1]}}]
        else:
            match = {"$regex": f"^{value}"} if sign == "starts" else {_OPERATORS[sign]: value}
            query.setdefault(_field(table, column), {}).update(match)

    return query


def _row(document: Mapping[str, Any]) -> Document:
    return {**document, "id": document["_id"]}


class MongoRows(Rows):
    tokens_key = "id"
    trajectory_key = "id"

    def __init__(self, store: MongoDBStore, session: Any) -> None:
        self._store = store
        self._session = session

    def _collection(self, table: str) -> Any:
        return self._store._database[table]

    async def now(self) -> Now:
        return await self._store._read_clock()

    async def find(
        self,
        table: str,
        columns: Sequence[str] = (),
        where: Sequence[Condition] = (),
        *,
        order: str | None = None,
        descending: bool = False,
        limit: int | None = None,
        lock: bool = False,
    ) -> Sequence[Row]:
        """`lock` needs no action: the transaction writes the document and is retried then."""
        if limit == 0:  # MongoDB's value for no limit
            return []

        fields = [_field(table, column) for column in columns] or None
        cursor = self._collection(table).find(_filter(table, where), fields, session=self._session)
        if order is not None:
            cursor = cursor.sort(_field(table, order), -1 if descending else 1)
        documents = await cursor.limit(limit or 0).to_list()
        if table == "steps":
            return [document | {"step": document["_id"]} for document in documents]
        return [_row(document) for document in documents]

    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        if not rows:
            return

        first = await self._store._reserve_numbers(table, len(rows)) if table in _NUMBERED else 0
        documents = []
        for index, row in enumerate(rows):
            document = {_field(table, column): value for column, value in row.items()}
            if table in _NUMBERED:
                document["seq"] = first + index
            elif table == "steps":
                document["step"] = row["step"]
            documents.append(document)

        await self._collection(table).insert_many(documents, session=self._session)

    async def update(
        self,
        table: str,
        where: Sequence[Condition],
        values: Row,
        increments: Sequence[str] = (),
    ) -> int:
        changes: Document = {"$set": dict(values)}
        if increments:
            changes["$inc"] = dict.fromkeys(increments, 1)
        result = await self._collection(table).update_many(
            _filter(table, where), changes, session=self._session
        )
        return int(result.modified_count)

    async def delete(self, table: str, where: Sequence[Condition] = ()) -> int:
        result = await self._collection(table).delete_many(
            _filter(table, where), session=self._session
        )
        return int(result.deleted_count)

    async def count(
        self, table: str, where: Sequence[Condition] = (), *, distinct: str | None = None
    ) -> int:
        if distinct is not None:
            return len({row[distinct] for row in await self.find(table, [distinct], where)})
        query = _filter(table, where)
        return int(await self._collection(table).count_documents(query, session=self._session))

    async def count_by(
        self, table: str, columns: Sequence[str], total: str | None = None
    ) -> list[tuple[tuple[str, ...], int, int]]:
        group = {
            "_id": {column: f"${column}" for column in columns},
            "number": {"$sum": 1},
            "total": {"$sum": 0 if total is None else f"${total}"},
        }
        cursor = await self._collection(table).aggregate([{"$group": group}], session=self._session)
        return [
            (tuple(d["_id"][column] for column in columns), d["number"], d["total"])
            for d in await cursor.to_list()
        ]

    async def write_calls(self, rows: Sequence[Row]) -> None:
        from pymongo import UpdateOne

        last_rows = {row["id"]: row for row in rows}
        found = await self.find("calls", ["id"], [("id", "in", [*last_rows])])
        known = {row["id"] for row in found}
        # One command for all new calls: an upsert of each takes twice as long.
        await self.insert("calls", [row for name, row in last_rows.items() if name not in known])
        updates = [
            UpdateOne(
                {"_id": name},
                {"$set": {key: row[key] for key in row if key not in ("id", *_CALL_FACTS)}},
            )
            for name, row in last_rows.items()
            if name in known
        ]
        if updates:
            await self._collection("calls").bulk_write(updates, session=self._session)

    async def take_turn(self) -> None:
        """Orders transactions: if two of them take a turn at the same time, one of them starts
        again."""
        await self._collection("meta").update_one(
            {"_id": "trainer"}, {"$inc": {"turn": 1}}, upsert=True, session=self._session
        )


async def _run_piece(piece: Piece, after: object, rows: MongoRows) -> tuple[int, Any]:
    return await piece(rows, after)


class MongoDBStore(Store):
    """`Store` describes the guarantees of the methods. `MongoDBStore.open` and `open_store` create
    a store object."""

    def __init__(
        self, client: AsyncMongoClient[Document], name: str, **options: Unpack[StoreOptions]
    ) -> None:
        """`options` are those of `Store`."""
        from pymongo.errors import PyMongoError

        super().__init__(f"mongodb {name}", **options)
        self._errors = (PyMongoError,)
        self._client = client
        self._database = client[name]

    @classmethod
    async def open(cls, url: str, *, create: bool = True, **options: Unpack[StoreOptions]) -> Self:
        """Opens a database. Creates the collections and indexes if needed, unless `create` is
        false. Raises StoreError for a server without transactions and for a database with other
        content, which stays unchanged.
        """
        try:
            from pymongo import AsyncMongoClient
            from pymongo.errors import PyMongoError
            from pymongo.uri_parser import parse_uri
        except ImportError as error:
            raise MissingExtraError(
                "a store in MongoDB needs pymongo 4.13 or newer: pip install 'agentevo[mongodb]'"
            ) from error

        try:
            name = await in_thread(lambda: parse_uri(url)["database"])
            if not name:
                raise UnusableStoreError(
                    "the URL of a store in MongoDB names a database: write mongodb://HOST/DATABASE"
                )

            client: AsyncMongoClient[Document] = AsyncMongoClient(
                url,
                serverSelectionTimeoutMS=int(400 * min(options.get("timeout_s", AWAY_S), AWAY_S)),
                w="majority",
            )
        except (PyMongoError, ValueError) as error:
            # pymongo's message may contain a part of the password, if the URL was split at the
            # wrong place.
            why = type(error).__name__ if "@" in url else error
            raise UnusableStoreError(
                f"{without_password(url)!r} is not the URL of a MongoDB database: {why}; write "
                "mongodb://HOST/DATABASE, with a password as ${env:NAME}"
            ) from None

        store = cls(client, name, **options)
        try:
            async with store._deadline("open"):
                await _check_or_make(store, create=create)
        except BaseException:
            await client.close()
            raise

        store._is_open = True
        return store

    async def close(self) -> None:
        async with self._deadline("close"):
            await self._client.close()

    async def lease_tasks(self, worker: str, *, lease_s: float, limit: int) -> list[Lease]:
        self._check_writable("lease_tasks")

        async def work() -> list[Lease]:
            now = await self._read_clock()
            leases: list[Lease] = []
            while len(leases) < limit and (lease := await self._lease_next(worker, now, lease_s)):
                leases.append(lease)
            if not leases:
                await self._restart_future_leases(now)
            return leases

        return await self._retry("lease_tasks", work)

    async def _lease_next(self, worker: str, now: Now, lease_s: float) -> Lease | None:
        """Leases a task: one whose lease expired, one whose retry is due, or the oldest."""
        tasks = self._database["tasks"]
        times = {"lease_started_at": now.steady, "lease_expires_at": now.steady + lease_s}
        taken: Document = {"state": "leased", "worker": worker, "not_before": 0.0, **times}
        increments = {"$inc": {"fencing_id": 1, "num_leases": 1}}
        ran_out = {"state": "leased", "lease_expires_at": {"$lte": now.steady}}
        while (
            document := await tasks.find_one(ran_out, sort=[("lease_expires_at", 1)])
        ) is not None:
            changes = expire_lease(document, now.wall, self._retries)
            same = {"_id": document["_id"], "fencing_id": document["fencing_id"], **ran_out}
            if changes["state"] == "poison":
                await tasks.update_one(same, {"$set": changes})
            elif (
                await tasks.update_one(same, {"$set": taken | changes, **increments})
            ).modified_count:
                return decode_lease(_row(document), worker, now=now.steady, lease_s=lease_s)

        for where, order in (
            (
                {"state": "queued", "not_before": {"$gt": 0.0, "$lte": now.steady}},
                [("not_before", 1), ("seq", 1)],
            ),
            ({"state": "queued", "not_before": 0.0}, [("seq", 1)]),
        ):
            document = await tasks.find_one_and_update(
                where, {"$set": taken, **increments}, sort=order
            )
            if document is not None:
                return decode_lease(_row(document), worker, now=now.steady, lease_s=lease_s)

        return None

    async def _restart_future_leases(self, now: Now) -> None:
        """Shortens leases and delays that are too long because the clock was set back: see
        clock.py."""
        tasks = self._database["tasks"]
        longest = now.steady + self._retries.max_delay_s

        late = {"state": "leased", "lease_started_at": {"$gt": now.steady + CLOCK_TOLERANCE_S}}
        for document in await tasks.find(late).to_list():
            length = document["lease_expires_at"] - document["lease_started_at"]
            times = {"lease_started_at": now.steady, "lease_expires_at": now.steady + length}
            await tasks.update_one(
                {"_id": document["_id"], "fencing_id": document["fencing_id"], **late},
                {"$set": times},
            )

        await tasks.update_many(
            {"state": "queued", "not_before": {"$gt": longest}}, {"$set": {"not_before": longest}}
        )

    async def size_bytes(self) -> int:
        statistics = await self._retry("size_bytes", lambda: self._database.command("dbStats"))
        return int(statistics["storageSize"]) + int(statistics.get("indexSize", 0))

    async def _vacuum(self) -> None:
        """The server keeps the space of deleted documents for new ones."""

    async def _transact(self, work: Work[T], role: Role) -> T:
        from pymongo.read_concern import ReadConcern

        async with (
            self._client.start_session() as session,
            await session.start_transaction(read_concern=ReadConcern("snapshot")),
        ):
            rows = MongoRows(self, session)
            if role in ("trainer", "alone"):
                await rows.take_turn()
            return await work(rows)

    async def _run_pieces(self, what: str, pieces: Mapping[str, Piece]) -> dict[str, int]:
        """Runs many transactions, because a transaction has a limited lifetime."""
        done = dict.fromkeys(pieces, 0)
        async with self._deadline(what):
            for name, piece in pieces.items():
                after = None
                while True:
                    work = partial(_run_piece, piece, after)
                    number, after = await self._run(what, work, "alone")
                    done[name] += number
                    if after is None:
                        break
                    await asyncio.sleep(_PAUSE_S)  # lets a trainer have its turn

        return done

    def _is_unreachable(self, error: BaseException) -> bool:
        from pymongo.errors import ConnectionFailure

        return isinstance(error, ConnectionFailure)

    def _is_transient(self, error: BaseException) -> bool:
        from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, PyMongoError

        is_clash = isinstance(error, DuplicateKeyError) or (
            isinstance(error, BulkWriteError)
            and any(
                write_error.get("code") == _DUPLICATE_KEY
                for write_error in (error.details or {}).get("writeErrors", [])
            )
        )
        is_lost = isinstance(error, AutoReconnect) and self._is_open
        is_labelled = isinstance(error, PyMongoError) and any(map(error.has_error_label, _LABELS))
        return is_clash or is_lost or is_labelled

    async def _read_clock(self) -> Now:
        if self._clock is not None:
            return self._clock.now()
        seconds = (await self._client.admin.command("hello"))["localTime"].timestamp()
        return Now(seconds, seconds)

    async def _reserve_numbers(self, table: str, count: int) -> int:
        """The first of `count` numbers for new rows. No other caller gets these numbers. It runs
        outside transactions: a gap in the numbers does no harm, but waiting would."""
        document = await self._database["meta"].find_one_and_update(
            {"_id": table}, {"$inc": {"seq": count}}
        )
        return int(document["seq"]) + 1 if document else 1

    async def clear(self) -> int:
        """Runs outside of transactions, because a large store takes longer than a transaction may
        last. Tokens are deleted first, so `counts` shows trajectories until nothing is left."""
        self._check_writable("clear")
        deleted = dict.fromkeys(TABLES, 0)

        async def work() -> int:
            for table in TABLES:
                deleted[table] += (await self._database[table].delete_many({})).deleted_count
            return deleted["trajectories"] + deleted["tasks"] + deleted["steps"]

        return await self._retry("clear", work)


async def _check_or_make(store: MongoDBStore, *, create: bool) -> None:
    """Ensures that the database holds a store of this version. Every step may be repeated, and
    several processes may run it at once. Raises StoreError, and changes nothing, for a server
    without transactions, a newer version, other content, an empty database unless `create` is true,
    and an older version if the store is read only."""
    database = store._database
    where = store.where
    hello = await store._client.admin.command("hello")
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise UnusableStoreError(
            f"store {where}: this server has no transactions, which a store needs to be "
            f"exactly-once: start mongod with "
            "--replSet rs0 and call rs.initiate() once (a single member is enough), or use "
            "PostgreSQL"
        )

    schema = await database["meta"].find_one({"_id": "schema"})
    if schema is not None:
        if schema["version"] > SCHEMA_VERSION:
            raise UnusableStoreError(
                f"store {where}: its schema {schema['version']} is of a newer AgentEvo, this one "
                f"supports up to {SCHEMA_VERSION}: upgrade "
                "with pip install -U agentevo; it was left as it is"
            )

        if store._read_only and schema["version"] < SCHEMA_VERSION:
            raise older_schema(where, schema["version"])

        if schema["version"] < SCHEMA_VERSION:
            await _make_calls(database)
            await _make_images(database)
            await database["meta"].update_one(
                {"_id": "schema", "version": {"$lt": SCHEMA_VERSION}},
                {"$set": {"version": SCHEMA_VERSION}},
            )

        return

    await _refuse_foreign(database, where)
    if not create:
        raise NoStoreError(f"store {where}: this database has no store: check the URL")

    for name, indexes in INDEXES.items():
        for columns in indexes:
            await database[name].create_index([(column, 1) for column in columns])

    for name in ("tokens", "steps"):
        await _make_collection(database, name)

    for name in ("trainer", "tasks", "trajectories"):
        await _make_counter(database, name)

    await _make_calls(database)
    await _make_images(database)
    await database["meta"].update_one(
        {"_id": "schema"}, {"$setOnInsert": {"version": SCHEMA_VERSION}}, upsert=True
    )


async def _refuse_foreign(database: Any, where: str) -> None:
    """Raises StoreError if a collection has one of our names and is not empty. (If another process
    is creating a store now, its collections are still empty.)"""
    for name in sorted(set(TABLES) & set(await database.list_collection_names())):
        if await database[name].find_one({}) is not None:
            raise UnusableStoreError(
                f"store {where}: the database holds a collection {name!r} that is not "
                f"AgentEvo's: give another name"
            )


async def _make_collection(database: Any, name: str) -> None:
    from pymongo.errors import OperationFailure

    try:
        await database.create_collection(name, check_exists=False)
    except OperationFailure as error:
        if error.code != _NAMESPACE_EXISTS:
            raise


async def _make_counter(database: Any, name: str) -> None:
    await database["meta"].update_one(
        {"_id": name}, {"$setOnInsert": {"seq": 0, "turn": 0}}, upsert=True
    )


async def _make_calls(database: Any) -> None:
    """Creates the parts of version 2 that version 1 lacks. It may be repeated."""
    for columns in CALL_INDEXES:
        await database["calls"].create_index([(column, 1) for column in columns])
    await _make_counter(database, "calls")


async def _make_images(database: Any) -> None:
    """Creates the parts of version 3 that version 2 lacks. It may be repeated."""
    await _make_collection(database, "images")
    for columns in IMAGE_INDEXES:
        await database["image_uses"].create_index([(column, 1) for column in columns])


stores.register("mongodb")(MongoDBStore.open)
stores.register("mongodb+srv")(MongoDBStore.open)
