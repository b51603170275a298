"""Log-probs that a run computes once, with its initial policy. A file in the run's folder stores
them for all processes and for resumed runs.

An existing entry is never replaced: a later process, with newer weights, reads it. If two processes
compute an entry at the same time, the first entry stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import filelock
import msgspec

from agentevo.errors import ConfigError
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.files import must_write, write_atomic

LOCK_S = 30.0


class Baseline(msgspec.Struct, frozen=True):
    """The policy's log-probs of some tokens."""

    task: str
    """The task's id, for people who read the file."""
    version: int
    """The version of the policy's weights."""
    logprobs: list[float]


def baseline_key(agent: str, context_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The key of an agent's tokens after a context."""
    return hashlib.sha256(json.dumps([agent, list(context_ids), list(ids)]).encode()).hexdigest()[
        :32
    ]


class BaselineScorers:
    """Reads and writes the log-probs of the initial policy. Without a path, the entries last as
    long as the process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Baseline] | None = {} if path is None else None

    async def known(self) -> Mapping[str, Baseline]:
        """The existing entries, by key. Raises ConfigError for a file that can't be read."""
        if self._known is None:
            self._known = await in_thread(self._read)
        return self._known

    async def add(self, new: Mapping[str, Baseline]) -> None:
        """Stores new entries. Raises DiskError."""
        before = await self.known()
        self._known = {**new, **before}
        if self._path is not None:
            stored = await in_thread(self._write, dict(self._known))
            self._known = {**self._known, **stored}  # includes entries of other processes

    def _read(self) -> dict[str, Baseline]:
        assert self._path is not None
        try:
            return decode_json(self._path.read_bytes(), dict[str, Baseline])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{self._path} can't be read ({error}): delete it, and the run computes the "
                "baselines again with the current weights"
            ) from error

    def _write(self, entries: dict[str, Baseline]) -> dict[str, Baseline]:
        assert self._path is not None
        lock = self._path.with_name(f".{self._path.name}.lock")
        with must_write(self._path), filelock.FileLock(lock, timeout=LOCK_S):
            merged = {**entries, **self._read()}
            write_atomic(self._path, msgspec.json.encode(merged))
        return merged
