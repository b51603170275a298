"""The collections and indexes of a store in MongoDB, and the migration from an older version. Every
step may be repeated, and several processes may run it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentevo.errors import NoStoreError, UnusableStoreError
from agentevo.store.store import older_schema

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient

SCHEMA_VERSION = 2
"""The version of the documents that mongodb.py describes."""

Document = dict[str, Any]

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
_NAMESPACE_EXISTS = 48


async def check_or_make(
    client: AsyncMongoClient[Document],
    database: Any,
    where: str,
    *,
    create: bool,
    read_only: bool = False,
) -> None:
    """Ensures that the database holds a store of this version. Raises StoreError, and changes
    nothing, for a server without transactions, a newer version, other content, and an empty
    database unless `create` is true. With `read_only`, also raises it for an older version."""
    from pymongo.errors import OperationFailure

    hello = await client.admin.command("hello")
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

        if read_only and schema["version"] < SCHEMA_VERSION:
            raise older_schema(where, schema["version"])

        if schema["version"] < SCHEMA_VERSION:
            await _make_calls(database)
            await database["meta"].update_one(
                {"_id": "schema", "version": 1}, {"$set": {"version": SCHEMA_VERSION}}
            )

        return

    await _refuse_foreign(database, where)
    if not create:
        raise NoStoreError(f"store {where}: this database has no store: check the URL")

    for name, indexes in INDEXES.items():
        for columns in indexes:
            await database[name].create_index([(column, 1) for column in columns])

    for name in ("tokens", "steps"):
        try:
            await database.create_collection(name, check_exists=False)
        except OperationFailure as error:
            if error.code != _NAMESPACE_EXISTS:
                raise

    for name in ("trainer", "tasks", "trajectories"):
        await _make_counter(database, name)

    await _make_calls(database)
    await database["meta"].update_one(
        {"_id": "schema"}, {"$setOnInsert": {"version": SCHEMA_VERSION}}, upsert=True
    )


async def _refuse_foreign(database: Any, where: str) -> None:
    """Raises StoreError if a collection has one of our names and is not empty. (If another process
    is creating a store now, its collections are still empty.)"""
    own_collections = {"tasks", "trajectories", "tokens", "steps", "calls"}
    for name in sorted(own_collections & set(await database.list_collection_names())):
        if await database[name].find_one({}) is not None:
            raise UnusableStoreError(
                f"store {where}: the database holds a collection {name!r} that is not "
                f"AgentEvo's: give another name"
            )


async def _make_counter(database: Any, name: str) -> None:
    await database["meta"].update_one(
        {"_id": name}, {"$setOnInsert": {"seq": 0, "turn": 0}}, upsert=True
    )


async def _make_calls(database: Any) -> None:
    """Creates the parts of version 2 that version 1 lacks. It may be repeated."""
    for columns in CALL_INDEXES:
        await database["calls"].create_index([(column, 1) for column in columns])
    await _make_counter(database, "calls")
