"""Objects under an address of an object store: any file system that fsspec knows.

An object appears whole or not at all. Object stores guarantee this; for file:// this module does (a
killed writer leaves a hidden file, which `under` leaves out). The size of each upload is checked.
Every call has a deadline and its own thread. A thread that hangs is abandoned. Exceptions of a
store's package become OSError here. Credentials come from the environment, as the store's own
package reads them. Needs no torch.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from agentevo.errors import ConfigError, MissingExtraError
from agentevo.runtime.files import PARTIAL

CALL_S = 30.0
"""The deadline of a call that transfers no content. A call that transfers content gets additional
time for its bytes."""
LOWEST_RATE = 2**20
"""The lowest transfer rate in bytes per second. It gives the deadline of an upload or download."""
MAX_HANGING_CALLS = 64
"""If this many calls hang, no further call is made."""
STATE_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created", "size", "ino")
"""The keys of an object's information that change when the object is rewritten."""

T = TypeVar("T")


class Objects:
    """See the module. Paths are relative to `url`."""

    def __init__(self, url: str, *, call_s: float = CALL_S) -> None:
        """Raises ConfigError for an address that fsspec does not know, MissingExtraError if its
        package is not installed."""
        self.url = url.rstrip("/")
        self._call_s = call_s
        self.files, self._root = _open_file_system(self.url)
        self._hanging: set[threading.Thread] = set()

    def info(self, path: str) -> dict[str, Any]:
        """The store's information on an object. Raises FileNotFoundError, OSError."""
        place = self._at(path)
        info: dict[str, Any] = self._call(lambda: self.files.info(place), place)
        return info

    def state(self, path: str) -> str:
        """A value that changes whenever the object is rewritten. Empty if it can't be read."""
        try:
            return state_of(self.info(path))
        except OSError:
            return ""

    def get(self, path: str) -> bytes:
        """The content. Reads again if the object is rewritten between the request for its size and
        the download. Raises FileNotFoundError, OSError."""
        place = self._at(path)
        info = self.info(path)
        deadline = time.monotonic() + self._call_s
        while True:
            size = int(info.get("size") or 0)
            content: bytes = self._call(lambda: self.files.cat_file(place), place, size)
            if len(content) == size:
                return content

            before = state_of(info)
            info = self.info(path)
            if state_of(info) == before:
                raise OSError(f"{place}: {len(content)} of {size} bytes have arrived")
            if time.monotonic() > deadline:
                raise OSError(f"{place}: it was rewritten during each download")

    def put(self, path: str, content: bytes) -> None:
        """Writes the object. Raises OSError if it did not arrive completely."""
        place = self._at(path)
        if "file" not in self._protocols:
            self._upload(place, content)
            return

        folder, _, name = place.rpartition("/")
        self._call(lambda: self.files.makedirs(folder, exist_ok=True), folder)

        staging = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}{PARTIAL}"
        try:
            self._upload(staging, content)
            self._call(lambda: os.replace(staging, place), place)
        except BaseException:
            with suppress(OSError):
                self._call(lambda: os.unlink(staging), staging)
            raise

    def _upload(self, place: str, content: bytes) -> None:
        self._call(lambda: self.files.pipe_file(place, content), place, len(content))
        size = self._call(lambda: self.files.info(place), place).get("size")
        if size != len(content):
            raise OSError(f"{place}: {size} of {len(content)} bytes have arrived")

    def under(self, path: str = "") -> dict[str, dict[str, Any]]:
        """The objects directly under a path: last part of the name -> the store's information. The
        store's list may be outdated. Objects that a `put` is still writing are left out. Raises
        OSError."""
        place = self._at(path)
        try:
            entries = self._call(lambda: self.files.ls(place, detail=True), f"the list of {place}")
        except FileNotFoundError:
            return {}
        named = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
        return {name: entry for name, entry in named.items() if not name.endswith(PARTIAL)}

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Deletes the object. Raises FileNotFoundError, OSError."""
        place = self._at(path)
        self._call(lambda: self.files.rm(place, recursive=recursive), place)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @property
    def _protocols(self) -> tuple[str, ...]:
        named = self.files.protocol
        return (named,) if isinstance(named, str) else tuple(named)

    def _call(self, function: Callable[[], T], what: str, size: int = 0) -> T:
        """Calls the store's package. No other function does."""
        within_s = self._call_s + size / LOWEST_RATE
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001, passed to the caller that waits, below
                answer.set_exception(error)

        self._hanging = {thread for thread in self._hanging if thread.is_alive()}
        if len(self._hanging) >= MAX_HANGING_CALLS:
            raise OSError(f"{self.url}: {MAX_HANGING_CALLS} calls hang")

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


def state_of(info: dict[str, Any]) -> str:
    """See `Objects.state`. `info` is what `Objects.info` or `Objects.under` returned."""
    return repr([info.get(key) for key in STATE_KEYS])


def _open_file_system(url: str) -> tuple[Any, str]:
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
