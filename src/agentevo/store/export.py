"""Trajectories out of a store, for other tools: one JSON object a line, nothing left out.

A line holds the fields of `Trajectory` (with its turns: ids, log-probs, versions, messages) and beside them `split`, `step`, `state`,
`trained_step`, `drop_reason` and `written_at`. The file appears whole or not at all; the same store gives the same bytes.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Unpack, cast

import msgspec

from agentevo.errors import StoreError
from agentevo.store.store import Store, StoredTrajectory, TrajectoryFilter

_JSON = msgspec.json.Encoder()


async def export_jsonl(store: Store, path: Path | str, **filters: Unpack[TrajectoryFilter]) -> int:
    """Writes the matching trajectories to `path` (.jsonl or .jsonl.gz), replacing what is there; returns how many.

    Raises StoreError for another extension and for a path that can't be written.
    """
    target = Path(path)
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise StoreError(f"can't export to {target}: the name must end in .jsonl or .jsonl.gz")
    count = 0
    try:
        with _whole_file(target) as file:
            async for stored in store.trajectories(**filters):
                file.write(_line(stored))
                count += 1
    except OSError as error:
        raise StoreError(f"can't export to {target}: {error.strerror or error}") from error
    return count


def _line(stored: StoredTrajectory) -> bytes:
    ledger = msgspec.structs.asdict(stored)
    trajectory = msgspec.structs.asdict(ledger.pop("trajectory"))
    return _JSON.encode(trajectory | ledger) + b"\n"


@contextmanager
def _whole_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name only when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as raw:
            if target.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    yield cast(IO[bytes], packed)
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
