"""A cache of answers, with one file for each question. The file's name is the digest of the
server's URL and the whole body, including the seed. The files have the answers, but no keys.

The size is bounded: a process that finds the cache above its limit removes the oldest entries, down
to three quarters of the limit. A process checks the size after it has written a sixteenth of the
limit. If several processes write at once, the cache can exceed the limit by what they wrote between
checks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from agentevo.inference.remote_models.wire import RemoteReply
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import create_atomic, must_write


class ReplyCache:
    """See the module. Any number of processes may use one folder."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit`: the most bytes of answers."""
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._since_look = limit
        """The bytes written since the last check of the folder. A new process checks at its first
        answer."""

    def find(self, url: str, body: bytes) -> RemoteReply | None:
        """The cached answer, or None. A file that can't be read counts as missing."""
        try:
            content = self._path(url, body).read_bytes()
            reply = decode_json(content, RemoteReply)
        except (OSError, msgspec.MsgspecError):
            return None
        return msgspec.structs.replace(reply, is_cached=True, cost=0.0)

    def keep(self, url: str, body: bytes, reply: RemoteReply) -> None:
        """Stores an answer. The first answer to a question stays."""
        path = self._path(url, body)
        with must_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = msgspec.json.encode(reply).decode()
            create_atomic(path, content)

        with self._lock:
            self._since_look += len(content)
            if self._since_look >= self._limit / 16:
                self._since_look = 0
                self._make_room()

    def _make_room(self) -> None:
        """Removes the oldest entries if the cache is above its limit. Ignores files that other
        processes have removed."""
        entries = []
        for path in self._folder.glob("??/*.json"):
            with suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))

        total = sum(size for _, size, _ in entries)
        if total <= self._limit:
            return

        for _, size, path in sorted(entries):
            if total <= self._limit * 3 / 4:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, url: str, body: bytes) -> Path:
        digest = sha256(url.encode() + b"\n" + body).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.json"
