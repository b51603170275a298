"""The replies of a sandbox's supervisor, in the forms that the host and the store accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agentevo.environments.sandbox.inside.frames import LARGEST_CALL
from agentevo.environments.sandbox.sandbox import Failure
from agentevo.errors import storable

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

LONGEST_CODE = 4 * 2**20


class SandboxReply(msgspec.Struct):
    """The reply to any call that runs code."""

    error: Failure | None
    stdout: str
    stderr: str
    files: list[str]


class RunReply(SandboxReply):
    """The reply to `run`."""

    is_alive: bool
    is_new: bool
    value: str | None


class ProgramReply(SandboxReply):
    """The reply to `execute`."""

    exit_code: int | None


class SandboxEnded(Exception):
    """The whole sandbox has ended."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def violation(what: str) -> SandboxEnded:
    """The error for a sandbox that sent an invalid message, described by `what`."""
    return SandboxEnded(Failure("ProtocolViolation", f"the sandbox sent {what}, and was ended"))


def storable_failure(failure: Failure | None) -> Failure | None:
    if failure is None:
        return None
    return Failure(
        storable(failure.type, 300), storable(failure.message), storable(failure.traceback, 8000)
    )


def is_unicode(text: str) -> bool:
    """Whether a text can be sent as UTF-8. A model's JSON can contain halves of surrogate pairs,
    which UTF-8 does not allow."""
    return text.isascii() or text.encode("utf-8", "replace").decode() == text


def code_problem(code: str) -> Failure | None:
    """The failure for code that can't be sent. None for other code."""
    if len(code) > LONGEST_CODE:
        return Failure("ValueError", f"{len(code):,} characters of code, at most 4 MiB")
    if not is_unicode(code):
        return Failure("UnicodeEncodeError", "the code is no text: it has half of a surrogate pair")
    return None


def longest_message(section: SandboxSection) -> int:
    """The maximum size in bytes of a message from a sandbox of this section."""
    output = 3 * section.output_kib * 1024 * 6
    files = section.file_mib * 2**20 * 3 // 2 + section.max_files * 1100
    return output + files + 2 * LARGEST_CALL
