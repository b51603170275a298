"""Chooses the kind of sandbox that works here, and limits the number of open ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentevo.environments.sandbox.sandbox import Sandbox, SandboxKind, SandboxTool, sandboxes
from agentevo.errors import SandboxError

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

ORDER = ("bubblewrap", "landlock")
"""The kinds that `auto` tries, never `none`."""
_working: set[tuple[object, ...]] = set()


async def problem_of(name: str, section: SandboxSection) -> str:
    """Why a kind can't be used here, or an empty text. A success is cached in this process. A
    failure is not, because this section's limits or a busy machine may be the cause.
    """
    key = (name, section.packages, section.url, section.api_key, section.cpus is None)
    if key in _working:
        return ""
    problem = await sandboxes.get(name)().problem(section)
    if not problem:
        _working.add(key)
    return problem


async def chosen_kind(section: SandboxSection) -> str:
    """The name of the kind that a section chooses. Raises SandboxError if none can be used."""
    names = ORDER if section.type == "auto" else (section.type,)
    problems = {}
    for name in names:
        problems[name] = await problem_of(name, section)
        if not problems[name]:
            return name

    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise SandboxError(
        f"no sandbox can be used on this machine ({reasons}). `agentevo doctor` tries them; "
        "sandbox.type=none runs code unprotected, as this user"
    )


class Sandboxes:
    """Opens sandboxes of one section, at most `max_sandboxes` at a time."""

    def __init__(self, section: SandboxSection) -> None:
        """Raises UnknownNameError for an unknown kind."""
        if section.type != "auto":
            sandboxes.get(section.type)
        self._section = section
        self._free = asyncio.Semaphore(section.max_sandboxes)
        self._kind: SandboxKind | None = None

    @asynccontextmanager
    async def open(self, tools: Mapping[str, SandboxTool] | None = None) -> AsyncIterator[Sandbox]:
        """Opens a sandbox, and closes it at the end of the block. Raises SandboxError."""
        for name in tools or {}:
            if not name.isidentifier():
                raise SandboxError(f"the tool {name!r} can't be a function: rename it")

        wait_s = self._section.wait_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            limit = self._section.max_sandboxes
            raise SandboxError(
                f"{limit} sandboxes are open, and none closed within {wait_s:g} s: raise "
                "max_sandboxes, or close them"
            ) from error

        try:
            if self._kind is None:
                self._kind = sandboxes.get(await chosen_kind(self._section))()
            sandbox = await self._kind.open(self._section, dict(tools or {}))
            try:
                yield sandbox
            finally:
                await sandbox.close()
        finally:
            self._free.release()
