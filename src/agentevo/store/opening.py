"""Opens a store by its URL, whatever its database."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, TypedDict, Unpack

from agentevo.errors import UnusableStoreError
from agentevo.runtime.credentials import with_environment, without_password
from agentevo.runtime.registry import Registry
from agentevo.store.clock import Clock
from agentevo.store.records import RETRIES, RetryPolicy
from agentevo.store.store import Store


class StoreOptions(TypedDict, total=False):
    """The options of `open_store` that are the same for every backend."""

    timeout_s: float
    retries: RetryPolicy
    clock: Clock | None
    read_only: bool


class StoreOpener(Protocol):
    """Opens a store of one kind. Registered under the scheme of its URL."""

    async def __call__(
        self, url: str, *, create: bool = True, **options: Unpack[StoreOptions]
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

    return await stores.get(scheme)(
        address,
        timeout_s=timeout_s,
        create=create and not read_only,
        retries=retries,
        clock=clock,
        read_only=read_only,
    )


def older_schema(where: str, version: object) -> UnusableStoreError:
    """The error for a store of an older version that is open for reading only."""
    return UnusableStoreError(
        f"{where} has the schema {version} of an older AgentEvo, but it is open for reading only "
        f"here: `agentevo store URL|RUN_DIR migrate` updates it to this version"
    )
