"""Weights on their way through an object store, for engines that share no folder with the trainer:
any file system that fsspec knows, under rollout.weights.url.

An object appears whole or not at all, but there is no renaming of folders. So a version's files are
uploaded, side by side, each looked at again by its size, then its manifest, then latest.json. An
upload that breaks off, or that a reader meets halfway, is found out by the checksums. Nothing is
looked for by listing, which may lag behind: lists are for deleting old versions alone.

`writer.json` has a random id that the trainer's run folder has too: another run's trainer, which
would give its weights to this one's engines, is refused. Every call has a deadline, and is made on
a thread of its own that is left behind where it hangs. What a store's package raises becomes
OSError here. Credentials come from the environment, as the store's own package reads them.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.core import url_to_fs
from safetensors.torch import save

from agentevo.errors import ConfigError, EngineError, MissingExtraError
from agentevo.files import write_atomic
from agentevo.inference.weight_transport import Latest
from agentevo.inference.weight_versions import (
    LATEST_FILE,
    MANIFEST_FILE,
    Content,
    Part,
    WeightVersions,
    folder_name,
    side_by_side,
    version_numbers,
)

WRITER_FILE = "writer.json"
CALL_S = 30.0
"""Deadline of a call that moves nothing, and what each gets besides its bytes."""
LOWEST_RATE = 2**20
"""Bytes per second that an upload or download is given time for."""
LOOK_S = 1.0
"""An engine asks the store for latest.json at most so often."""
MAX_HANGING = 64
"""Calls that may hang before no further one is made."""

T = TypeVar("T")


class ObjectStoreWeights(WeightVersions):
    """See the module. `id_file`: where the trainer keeps the id of its run's weights; None reads
    alone."""

    def __init__(
        self,
        url: str,
        *,
        full_every: int = 1,
        id_file: Path | None = None,
        call_s: float = CALL_S,
        look_s: float = 0.0,
    ) -> None:
        """Raises ConfigError for an address that fsspec does not know, MissingExtraError where its
        package is not installed."""
        super().__init__(full_every=full_every)
        self._url, self._id_file, self._call_s, self._look_s = (
            url.rstrip("/"),
            id_file,
            call_s,
            look_s,
        )
        self._files, self._root = _opened(self._url)
        self._hanging: set[threading.Thread] = set()
        self._looked: tuple[float, Latest | None] | None = None

    @property
    def place(self) -> str:
        """See WeightSource.place."""
        return self._url

    def versions(self) -> list[int]:
        """See WeightVersions.versions. As the store lists them."""
        try:
            found = self._call(lambda: self._files.ls(self._root, detail=False), "the list")
        except FileNotFoundError:
            return []
        return version_numbers(path.rstrip("/").rpartition("/")[2] for path in found)

    def announced(self) -> Latest | None:
        """See WeightVersions.announced."""
        if self._looked is not None and time.monotonic() - self._looked[0] < self._look_s:
            return self._looked[1]
        latest = super().announced()
        self._looked = (time.monotonic(), latest)
        return latest

    def state(self, version: int) -> tuple[str, ...]:
        """See WeightVersions.state. Of what the version builds on, its manifest has the names."""
        found = []
        for path in (self._path(None, LATEST_FILE), self._path(version, MANIFEST_FILE)):
            try:
                info = self._info(path)
            except OSError:
                found.append("")
            else:
                keys = (
                    "ETag",
                    "etag",
                    "md5Hash",
                    "mtime",
                    "LastModified",
                    "created",
                    "size",
                    "ino",
                )
                found.append(repr([info.get(key) for key in keys]))
        return tuple(found)

    def write(
        self, version: int, model: torch.nn.Module, *, keep: int, in_full: bool = False
    ) -> str:
        """See WeightVersions.write. Raises EngineError where another run's weights are."""
        self._claim()
        return super().write(version, model, keep=keep, in_full=in_full)

    def _claim(self) -> None:
        """The place is this run's from now on."""
        assert self._id_file is not None, "who only reads writes nothing"
        try:
            own = self._id_file.read_text()
        except FileNotFoundError:
            own = uuid.uuid4().hex
            self._id_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._id_file, own, durable=True)
        try:
            there = self._get(None, WRITER_FILE).decode(errors="replace")
        except FileNotFoundError:
            there = ""
        if there != own and own.startswith(there):  # nobody's yet, or our own upload broke off
            self._upload(self._path(None, WRITER_FILE), own.encode())
            there = self._get(None, WRITER_FILE).decode(errors="replace")
        if there != own:
            raise EngineError(
                f"rollout.weights.url={self._url} has the weights of another run: give this one an "
                "address of its own, or delete what is there if nobody trains it any more"
            )

    def _path(self, version: int | None, file: str) -> str:
        middle = [] if version is None else [folder_name(version)]
        return "/".join([self._root, *middle, file])

    def _get(self, version: int | None, file: str) -> bytes:
        path = self._path(version, file)
        size = int(self._info(path).get("size") or 0)
        content: bytes = self._call(lambda: self._files.cat_file(path), file, size)
        if len(content) != size:
            raise OSError(f"{path}: {len(content)} of {size} bytes have arrived")
        return content

    def _info(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call(lambda: self._files.info(path), path)
        return found

    def _put(
        self,
        version: int,
        contents: list[Content],
        manifest: Callable[[list[Part]], bytes],
    ) -> bytes:
        def upload(content: Content) -> Part:
            raw = save(content.tensors)
            self._upload(self._path(version, content.file), raw)
            return Part(content.file, hashlib.sha256(raw).hexdigest(), len(raw))

        made = manifest(side_by_side(upload, contents))
        self._upload(self._path(version, MANIFEST_FILE), made)
        return made

    def _put_latest(self, content: bytes) -> None:
        self._claim()
        self._upload(self._path(None, LATEST_FILE), content)

    def _upload(self, path: str, content: bytes) -> None:
        parent = path.rpartition("/")[0]
        if "file" in self._protocols:  # object stores have no folders
            self._call(lambda: self._files.makedirs(parent, exist_ok=True), parent)
        self._call(lambda: self._files.pipe_file(path, content), path, len(content))
        found = self._info(path).get("size")
        if found != len(content):
            raise OSError(f"{path}: {found} of {len(content)} bytes have arrived")

    def _delete(self, version: int) -> None:
        folder = f"{self._root}/{folder_name(version)}"
        try:
            self._call(lambda: self._files.rm(folder, recursive=True), folder)
        except OSError:
            return  # it is old, and tried again with the next version

    def _check_part(self, version: int, part: Part) -> None:
        """That it is there, by its size: reading everything again would cost what the store sells.
        Who reads compares the bits."""
        try:
            found = self._info(self._path(version, part.file)).get("size")
        except OSError as error:
            raise self._unreadable(version, error) from error
        if found != part.bytes:
            raise EngineError(
                f"{self._name(version)}/{part.file} has {found} bytes and not {part.bytes}: torn"
            )

    @property
    def _protocols(self) -> tuple[str, ...]:
        named = self._files.protocol
        return (named,) if isinstance(named, str) else tuple(named)

    def _call(self, function: Callable[[], T], what: str, size: int = 0) -> T:
        """The one place in which a store's package is called."""
        within_s = self._call_s + size / LOWEST_RATE
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001, told to who waits, below
                answer.set_exception(error)

        self._hanging = {thread for thread in self._hanging if thread.is_alive()}
        if len(self._hanging) >= MAX_HANGING:
            raise OSError(f"{self._url}: {MAX_HANGING} calls hang")
        thread = threading.Thread(target=work, name="object store", daemon=True)
        thread.start()
        try:
            return answer.result(within_s)
        except OSError:
            if not answer.done():
                self._hanging.add(thread)
                raise OSError(f"{what}: no answer within {within_s:.0f} s") from None
            raise
        except Exception as error:
            raise OSError(f"{what}: {type(error).__name__}: {error}") from error


def _opened(url: str) -> tuple[Any, str]:
    """(file system, the path in it)."""
    protocol = url.partition("://")[0]
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            f"rollout.weights.url={url}: fsspec knows no {protocol!r}: use s3://BUCKET/FOLDER, "
            "gs://, az://, or another of fsspec.available_protocols()"
        )
    try:
        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = "pip install 'agentevo[s3]'" if protocol in ("s3", "s3a") else str(error)
        raise MissingExtraError(f"rollout.weights.url={url} needs a package: {extra}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"rollout.weights.url={url} can't be used: {error}") from error
    return files, str(root).rstrip("/")
