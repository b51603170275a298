"""Errors of a store that is open for reading only."""

from __future__ import annotations

from agentevo.errors import StoreError, UnusableStoreError


def older_schema(where: str, version: object) -> UnusableStoreError:
    """The error for a store of an older version that is open for reading only."""
    return UnusableStoreError(
        f"{where} has the schema {version} of an older AgentEvo, but it is open for reading only "
        f"here: `agentevo store URL|RUN_DIR migrate` updates it to this version"
    )


def only_read(where: str, what: str) -> StoreError:
    """The error for a call that writes to a store that is open for reading only."""
    return StoreError(f"{what}: {where} was opened for reading only")
