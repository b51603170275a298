"""The contract of a sandbox: code in, its results out.

A sandbox has a work folder, and one Python interpreter whose variables persist from one `run` to
the next. An `Execution` reports everything that the code does. The code's errors never raise here.
`SandboxError` is raised for problems that the code did not cause: a sandbox that can't start, a
path outside the work folder, a closed sandbox. One call runs at a time; others wait for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from agentevo.runtime.registry import Registry

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection


class Failure(msgspec.Struct, frozen=True):
    """Why code did not finish."""

    type: str
    """The exception's type, or the limit that ended the code: `Timeout`, `OutOfMemory`, `DiskFull`,
    `TooManyProcesses`, `InterpreterDied`, `ProtocolViolation`, `SandboxDied`."""
    message: str
    traceback: str = ""
    """Lines of the user's code only."""


class Execution(msgspec.Struct, frozen=True):
    """The result of one call of `Sandbox.run`."""

    stdout: str
    stderr: str
    """The head and the tail. A note between them shows how much was left out."""
    value: str | None
    """The repr of the last expression, as a notebook shows it; None for None or no expression."""
    error: Failure | None
    files: tuple[str, ...]
    """Files of the work folder that were made, changed or deleted, by their paths in it."""
    duration_s: float
    is_alive: bool
    """Whether the interpreter is still alive. If not, its variables are lost, and the next call has
    a new interpreter."""
    is_new: bool
    """Whether this call had a new interpreter because an earlier one had ended."""
    files_lost: bool = False
    """Whether the work folder was lost, too: the whole sandbox ended, and the next call has a new
    one."""


class ProgramRun(msgspec.Struct, frozen=True):
    """The result of one call of `Sandbox.execute`."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Negative for the signal that ended it; None if a limit did, see `error`."""
    error: Failure | None
    files: tuple[str, ...]
    duration_s: float
    files_lost: bool = False
    server_lost: bool = False
    """Whether the server was lost during the call: the program's effects are unknown."""


class SandboxTool(msgspec.Struct, frozen=True):
    """A function of the host that the code can call by name. Its arguments are untrusted."""

    name: str
    parameters: tuple[str, ...]
    """The parameter names in order, for positional arguments."""
    description: str
    call: Callable[[dict[str, Any]], Awaitable[Any]]
    """Returns a JSON value. An exception is raised in the code as `ToolError`, with the message of
    an AgentEvoError and the type of any other."""


class Sandbox(Protocol):
    """See the module."""

    async def run(self, code: str, deadline_s: float | None = None) -> Execution:
        """Runs code in the interpreter, for at most `deadline_s` seconds (default: the section's
        `timeout_s`)."""
        ...

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float | None = None
    ) -> ProgramRun:
        """Runs a program alone in the work folder. The interpreter, its variables and all other
        processes of the sandbox are ended first, and the program's children end with the program.
        The command `python` is this Python."""
        ...

    async def files(self) -> dict[str, int]:
        """The sizes of the regular files in the work folder, by their paths in it."""
        ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Creates or replaces a file, and creates the folders above it."""
        ...

    async def export(self, folder: Path) -> tuple[str, ...]:
        """Copies the regular files of the work folder into a new folder of the host, and returns
        their paths. Files whose names are not UTF-8 are left out."""
        ...

    async def close(self) -> None:
        """Ends all its processes, and deletes its files. Can be called again."""
        ...


class SandboxKind(Protocol):
    """A kind of sandboxes."""

    async def problem(self, section: SandboxSection) -> str:
        """Why the kind can't be used on this machine, and what to do. Empty if a trial
        succeeded."""
        ...

    async def open(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> Sandbox: ...


sandboxes: Registry[Callable[[], SandboxKind]] = Registry("sandboxes")
"""Kinds of sandboxes by the `type` of a SandboxSection."""
