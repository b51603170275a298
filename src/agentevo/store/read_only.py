"""Errors of a store that may only be read."""

from __future__ import annotations

from agentevo.errors import StoreError, UnusableStoreError


def older_schema(where: str, version: object) -> UnusableStoreError:
    """The error for a store that may only be read and is of an older version."""
    return UnusableStoreError(
        f"{where} has the schema {version} of an older AgentEvo, but it is open for reading only "
        f"here: `agentevo store migrate URL|RUN_DIR` updates it to this version"
    )


def only_read(where: str, what: str) -> StoreError:
    """The error for a call that writes to a store that may only be read."""
    return StoreError(f"{what}: {where} was opened for reading only")
