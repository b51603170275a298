"""Sandboxes of other projects' servers, which run code and do nothing else: no files in or out, no
programs, no functions of this machine, and limits of their own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agentevo.errors import SandboxError, storable
from agentevo.sandbox.inside.frames import clipped
from agentevo.sandbox.replies import refused_code
from agentevo.sandbox.sandbox import Execution, Failure, ProgramRun, SandboxTool

if TYPE_CHECKING:
    from agentevo.config.sandbox import SandboxSection

LARGEST_ANSWER = 16 * 2**20
"""Bytes of an answer that are read."""
_TRIAL = "print(6 * 7)"


class ServerLost(Exception):
    """The server was asked, and did not answer as it should: what the code did is not known."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CodeOnlySandbox(ABC):
    """See Sandbox, and the module."""

    server: str
    """Whose server it is, in words."""

    def __init__(self, section: SandboxSection) -> None:
        self.section = section
        self._is_closed = False

    @abstractmethod
    async def start(self) -> None:
        """Raises SandboxError where the server can't be used."""

    @abstractmethod
    async def ran(self, code: str, limit_s: float) -> tuple[str, str, Failure | None, bool]:
        """stdout, stderr, why the code failed, and whether earlier variables were lost. Raises
        ServerLost, and SandboxError where nothing could be asked."""

    async def tried(self) -> str:
        """What is wrong with the server; empty where a trial has succeeded."""
        try:
            await self.start()
            tried = await self.run(_TRIAL)
        except SandboxError as error:
            return str(error)
        finally:
            await self.close()

        is_good = tried.error is None and "42" in tried.stdout
        return "" if is_good else f"a trial at {self.section.url} has failed: {tried}"

    async def run(self, code: str, deadline_s: float | None = None) -> Execution:
        """See Sandbox.run. Raises SandboxError."""
        if self._is_closed:
            raise SandboxError("the sandbox is closed")

        limit = self.section.timeout_s if deadline_s is None else deadline_s
        if not 0 < limit < 1e6:
            raise SandboxError(f"a deadline of {limit} s: give seconds above 0 and below a million")
        if (refusal := refused_code(code)) is not None:
            return Execution("", "", None, refusal, (), 0.0, is_alive=True, is_new=False)

        began = time.monotonic()
        try:
            stdout, stderr, error, is_new = await self.ran(code, limit)
        except ServerLost as lost:
            failure = Failure(lost.kind, storable(str(lost), 1000))
            return Execution(
                stdout="",
                stderr="",
                value=None,
                error=failure,
                files=(),
                duration_s=time.monotonic() - began,
                is_alive=False,
                is_new=False,
                files_lost=True,
            )

        longest = self.section.output_kib * 1024
        return Execution(
            clipped(storable(stdout, LARGEST_ANSWER), longest),
            clipped(storable(stderr, LARGEST_ANSWER), longest),
            None,
            error,
            (),
            time.monotonic() - began,
            is_alive=True,
            is_new=is_new,
        )

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float | None = None
    ) -> ProgramRun:
        """Raises SandboxError."""
        self._refuse("runs no programs")

    async def files(self) -> dict[str, int]:
        """Raises SandboxError."""
        self._refuse("gives no files")

    async def read_file(self, path: str) -> bytes:
        """Raises SandboxError."""
        self._refuse("gives no files")

    async def write_file(self, path: str, content: bytes) -> None:
        """Raises SandboxError."""
        self._refuse("takes no files")

    async def export(self, folder: Path) -> tuple[str, ...]:
        """Raises SandboxError."""
        self._refuse("gives no files")

    async def close(self) -> None:
        """See Sandbox.close."""
        self._is_closed = True

    def _refuse(self, what: str) -> NoReturn:
        raise SandboxError(
            f"{self.server} {what}: use a sandbox of this machine, or type: remote with a server "
            "of `agentevo sandbox serve`"
        )


def refuse_tools(server: str, tools: Mapping[str, SandboxTool]) -> None:
    """Raises SandboxError where the code is to call functions of this machine."""
    if tools:
        raise SandboxError(
            f"{server} calls no functions of this machine ({', '.join(tools)}): leave the tools "
            "out, or use type: remote with a server of `agentevo sandbox serve`"
        )
