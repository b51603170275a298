"""Exports and imports a whole store as JSON lines.

`export_jsonl` writes trajectories, for other tools. A line has the fields of `Trajectory` (with its
turns: ids, log-probs, versions, messages), and `split`, `step`, `state`, `trained_step`,
`drop_reason`, `written_at`, `tokens_deleted`, `emptied` and `digest`. The digest identifies the
written content: an import refuses a line with other content.

`export_store` writes the whole store, for `import_store`: the lines above with `"kind":
"trajectory"`, and lines of the kinds `image`, `task`, `step` and `call`. Images come first, by
digest and with their bytes in base64, then tasks, then trajectories in the order of writing, then
steps, then calls. So an interrupted import can be repeated. A store
that is exported, imported into any backend and exported again gives the same bytes, except for
leases, which are not exported. An import refuses a line of an image whose content is none, or has
too many pixels, and gives each image the type of its content.

The file appears whole or not at all, and the same store gives the same bytes.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Unpack, cast

import msgspec

from agentevo.data.images import checked_header
from agentevo.errors import ImageError, StoreError, UnusableStoreError
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.parsing import check_file
from agentevo.runtime.progress import bar
from agentevo.store.records import StepRecord, StoredTask, StoredTrajectory, TrajectoryFilter
from agentevo.store.store import PAGE, Store
from agentevo.types import Call, ImagePart, Trajectory
from agentevo.types.images import ImageFile

_JSON = msgspec.json.Encoder(enc_hook=lambda column: column.tolist())  # columns of turns


class _CallLine(msgspec.Struct):
    """A line with a call. The call is nested, because it has a field `kind` of its own. The export
    does not say whether the call is still running, because that may change later."""

    call: Call


class _ImageLine(msgspec.Struct):
    """A line with an image: its file's bytes, in base64."""

    sha256: str
    media_type: str
    data: bytes


_KINDS: dict[str, Any] = {
    "image": _ImageLine,
    "task": StoredTask,
    "trajectory": StoredTrajectory,
    "step": StepRecord,
    "call": _CallLine,
}


async def export_jsonl(store: Store, path: Path | str, **filters: Unpack[TrajectoryFilter]) -> int:
    """Writes the matching trajectories to `path` (.jsonl or .jsonl.gz), replacing an existing file.
    Returns the number of trajectories.

    Raises StoreError for another extension and for a path that can't be written.
    """
    count = 0
    with atomic_file(Path(path)) as file, bar("trajectories") as written:
        async for stored in store.trajectories(**filters):
            file.write(_JSON.encode(_flatten(stored)) + b"\n")
            count += 1
            written.advance()
    return count


async def export_store(store: Store, path: Path | str) -> int:
    """Writes the whole store to `path`. Returns the number of lines.

    The store is read page by page, so the export is consistent only if nothing changes. If the
    store changes, raises StoreError and leaves the path unchanged.
    """
    count = 0
    before = await _progress(store)
    total = sum(before[0].get(kind, 0) for kind in ("tasks", "trajectories", "steps"))
    digests = await store.image_digests()
    total += await store.num_calls() + len(digests)
    with atomic_file(Path(path)) as file, bar("store export", total) as written:

        def write(kind: str, fields: dict[str, Any]) -> None:
            nonlocal count
            file.write(_JSON.encode({"kind": kind} | fields) + b"\n")
            count += 1
            written.advance()

        for digest in digests:
            image = await store.image(digest)
            write("image", msgspec.structs.asdict(image.part) | {"data": image.data})

        async for task in store.tasks():
            write("task", msgspec.structs.asdict(task))
        async for trajectory in store.trajectories():
            write("trajectory", _flatten(trajectory))

        for step in await store.steps():
            write("step", msgspec.structs.asdict(step))

        async for stored in store.calls():
            write("call", {"call": stored.call})

        if await _progress(store) != before:
            raise StoreError(
                f"can't export to {path}: the run is still writing, so its rows would be from "
                f"different moments: stop it first"
            )

    return count


async def _progress(store: Store) -> tuple[dict[str, int], StepRecord | None]:
    """Numbers that change whenever the state of a task, trajectory or step changes."""
    return await store.counts(), await store.last_step()


def check_export(path: Path | str) -> None:
    """Raises UnusableStoreError for a file whose first line is not from `export_store`."""
    next(_read_lines(Path(path)), None)


async def import_store(store: Store, path: Path | str) -> int:
    """Imports a file from `export_store`. Returns the number of new rows. Existing rows with the
    same content stay unchanged.

    Raises StoreError for a file that can't be read, with the number of the invalid line, and for
    ids that have other content in this store. The lines before the invalid one are then imported.
    """
    new = 0
    page: list[Any] = []
    for kind, stored in _read_lines(Path(path)):
        is_full = len(page) == (1 if kind == "image" else PAGE)  # an image may have megabytes
        if page and (is_full or not isinstance(page[0], _KINDS[kind])):
            new += await _put(store, page)
            page = []
        page.append(stored)

    return new + (await _put(store, page) if page else 0)


async def _put(store: Store, page: list[Any]) -> int:
    match page[0]:
        case StoredTask():
            return await store.put(tasks=page)
        case StoredTrajectory():
            return await store.put(trajectories=page)
        case StepRecord():
            return await store.put(steps=page)
        case _ImageLine():
            return await store.put_images(map(_image_of, page))
        case _:
            return await store.put(calls=[line.call for line in page])


def _image_of(line: _ImageLine) -> ImageFile:
    """The image, with the type that its content has. Raises StoreError for other content than an
    image, and for too many pixels or bytes."""
    try:
        header = checked_header(line.data, f"image {line.sha256}")
    except ImageError as error:
        raise StoreError(str(error)) from error
    return ImageFile(ImagePart(line.sha256, header.media_type), line.data)


def _flatten(stored: StoredTrajectory) -> dict[str, Any]:
    ledger = msgspec.structs.asdict(stored)
    trajectory = msgspec.structs.asdict(ledger.pop("trajectory"))
    return trajectory | ledger


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the (kind, record) of each line."""
    check_file(path)
    try:
        with path.open("rb") as raw, bar("store import", path.stat().st_size, "bytes") as read:
            file = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
            for number, line in enumerate(cast(IO[bytes], file), start=1):
                read.to(raw.tell())
                try:
                    yield _parse(line)
                except (msgspec.MsgspecError, KeyError, ValueError) as error:
                    what = f"unknown kind {error}" if isinstance(error, KeyError) else error
                    raise UnusableStoreError(
                        f"{path}: line {number} is not a line of a store's export: {what}"
                    ) from error
    except (OSError, EOFError) as error:
        raise UnusableStoreError(
            f"can't import {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _parse(line: bytes) -> tuple[str, Any]:
    kind = decode_json(line, _Kind).kind
    record = _KINDS[kind]
    if record is not StoredTrajectory:
        return kind, decode_json(line, record)

    ledger = {name for name in StoredTrajectory.__struct_fields__ if name != "trajectory"}
    fields = {name: value for name, value in msgspec.json.decode(line).items() if name in ledger}
    return kind, msgspec.convert(
        fields | {"trajectory": decode_json(line, Trajectory)}, type=StoredTrajectory
    )


class _Kind(msgspec.Struct):
    kind: str


@contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file. The file gets the target's name when the block ends without an error.
    After an error, the file and the folders that were created for it are deleted."""
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UnusableStoreError(
            f"can't export to {target}: the name must end in .jsonl or .jsonl.gz"
        )

    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
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
        except BaseException:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # another process has created a file there
                for folder in missing:
                    folder.rmdir()
            raise
    except OSError as error:
        raise UnusableStoreError(f"can't export to {target}: {error.strerror or error}") from error
