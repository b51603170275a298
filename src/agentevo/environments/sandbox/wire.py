"""The messages between a client of remote sandboxes and their server: one WebSocket for each
sandbox, one JSON message in each frame, bytes as base64.

    client: Open                        server: Opened, or Refused and the end
            Run | Execute | Files | Read | Write      Call ... Call, then Done or Failed
            Answer (to a Call)

One request runs at a time. The sandbox ends with the connection, whichever side ends the
connection. A message of another form also ends it.
"""

from __future__ import annotations

from typing import Any

import msgspec

PATH = "/sandbox"
REQUESTED = (
    "memory_mib",
    "cpu_s",
    "processes",
    "disk_mib",
    "file_mib",
    "max_files",
    "output_kib",
    "timeout_s",
    "max_tool_calls",
    "env",
    "packages",
)
"""The keys of a section that a client can set. The server sets the others."""
PING_S = 20.0
"""How often both sides ping each other."""
SILENT_S = 60.0
"""The seconds without an answer after which the other side counts as gone."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class ToolForm(msgspec.Struct, frozen=True):
    """A function of the client that the code can call."""

    name: str
    parameters: tuple[str, ...]
    description: str


class Open(_Message, frozen=True):
    """The first message: what the client requests, and how long it waits for a free place."""

    section: dict[str, Any]
    tools: tuple[ToolForm, ...]
    wait_s: float


class Run(_Message, frozen=True):
    id: int
    code: str
    deadline_s: float


class Execute(_Message, frozen=True):
    id: int
    argv: tuple[str, ...]
    stdin: bytes
    deadline_s: float


class Files(_Message, frozen=True):
    id: int


class Read(_Message, frozen=True):
    id: int
    path: str


class Write(_Message, frozen=True):
    id: int
    path: str
    content: bytes


class Answer(_Message, frozen=True):
    """The reply to a Call. If `error` is set, it is raised in the code instead of a result."""

    number: int
    result: Any = None
    error: str | None = None


class Opened(_Message, frozen=True):
    """A sandbox of this kind was opened."""

    kind: str


class Refused(_Message, frozen=True):
    """No sandbox was opened, and why."""

    message: str


class Call(_Message, frozen=True):
    """The code calls a function of the client."""

    number: int
    name: str
    arguments: dict[str, Any]


class Done(_Message, frozen=True):
    """The result of the request `id`: an Execution, a ProgramRun, sizes by path, base64 or
    nothing."""

    id: int
    value: Any


class Failed(_Message, frozen=True):
    """The request `id` failed, but not because of the code."""

    id: int
    message: str


Request = Run | Execute | Files | Read | Write
FromClient = Open | Request | Answer
FromServer = Opened | Refused | Call | Done | Failed
read_request = msgspec.json.Decoder(FromClient).decode
read_answer = msgspec.json.Decoder(FromServer).decode
to_json = msgspec.json.Encoder().encode
