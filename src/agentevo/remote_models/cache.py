"""Answers that are kept: one file for each question, named by the digest of the server's URL and
the whole body, the seed included. They hold what was said, and no key."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgspec

from agentevo.files import create_atomic, must_write
from agentevo.remote_models.wire import RemoteReply


class ReplyCache:
    """See the module. Any number of processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, url: str, body: bytes) -> RemoteReply | None:
        """What was answered before. A file that can't be read is none."""
        try:
            content = self._path(url, body).read_bytes()
            reply = msgspec.json.decode(content, type=RemoteReply)
        except (OSError, msgspec.MsgspecError):
            return None
        return msgspec.structs.replace(reply, is_cached=True, cost=0.0)

    def keep(self, url: str, body: bytes, reply: RemoteReply) -> None:
        """The first answer to a question stays."""
        path = self._path(url, body)
        with must_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            create_atomic(path, msgspec.json.encode(reply).decode())

    def _path(self, url: str, body: bytes) -> Path:
        digest = sha256(url.encode() + b"\n" + body).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.json"
