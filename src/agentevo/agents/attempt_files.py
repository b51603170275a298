"""The files of an attempt in a sandbox: the files of its task, and the files that its code writes.

A task has its files in its metadata (a column `files` of its row): an object that maps paths to
texts or {"base64": "..."}. New and changed files are read after each call of the sandbox and stored
with the trajectory. So an attempt that fails, is cancelled, or loses its sandbox keeps the files
from earlier calls.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from agentevo.agents.policy import Policy
from agentevo.environments.sandbox import Sandbox
from agentevo.errors import ConfigError, SandboxError
from agentevo.store.call_log import record_call
from agentevo.store.files import MAX_FILES, check_files, is_inner_path
from agentevo.types import Task

FILES = "files"
"""The key of the files in a task's metadata."""
_MOST_NAMED = 50


def given_files(task: Task) -> dict[str, bytes]:
    """The files that the task puts into the work folder, by path. Raises ConfigError for a wrong
    form."""
    files = task.metadata.get(FILES)
    if files is None:
        return {}

    form = 'give {"path": "text"}, or {"path": {"base64": "..."}}'
    if not isinstance(files, dict):
        raise ConfigError(f"task {task.id}: files is a {type(files).__name__}: {form}")

    try:
        return check_files({path: _content(path, content) for path, content in files.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {task.id}: files: {error}: {form}") from error


def _content(path: str, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()

    if (
        isinstance(content, dict)
        and content.keys() == {"base64"}
        and isinstance(content["base64"], str)
    ):
        try:
            return base64.b64decode(content["base64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{path[:100]!r} is not base64 ({error})") from error

    raise TypeError(f"{path[:100]!r} is neither a text nor base64")


class AttemptFiles:
    """The files of one attempt. `limit` is the maximum number of bytes to keep; 0 keeps no
    files."""

    def __init__(self, task: Task, policy: Policy, limit: int) -> None:
        """Raises ConfigError for task files in a wrong form."""
        self._given = given_files(task)
        self._policy = policy
        self._limit = limit
        self._are_there = False
        self._left_out: set[str] = set()

    @property
    def num_left_out(self) -> int:
        """The number of files written by the code whose final state is not kept."""
        return len(self._left_out)

    @property
    def announcement(self) -> str:
        """The text that lists the files for the policy. Empty if there are none."""
        if not self._given:
            return ""
        named = [f"- {path} ({len(content):,} bytes)" for path, content in self._given.items()]
        num_unnamed = len(named) - _MOST_NAMED
        rest = [f"- and {num_unnamed} more"] if num_unnamed > 0 else []
        return "\n".join(["Files in the current folder:", *named[:_MOST_NAMED], *rest])

    async def put(self, sandbox: Sandbox) -> bool:
        """Writes the task's files unless they exist, and returns whether it did. Raises
        SandboxError if the sandbox can't hold them."""
        if self._are_there:
            return False
        for path, content in self._given.items():
            await sandbox.write_file(path, content)
        self._are_there = True
        return bool(self._given)

    def lost(self) -> None:
        """Call this when the work folder is lost and the next one is empty. Kept files stay."""
        self._are_there = False

    async def keep(self, sandbox: Sandbox, changed: tuple[str, ...]) -> None:
        """Keeps the current content of the changed files, in the order of their paths, up to the
        limit. If the sandbox can't return them, only the files are lost."""
        if not changed:
            return

        if not self._limit:
            self._left_out.update(changed)
            return

        async with record_call("sandbox", "keep_files") as call:
            try:
                left_out = await self._read(sandbox, changed)
                call.note(files=len(self._policy.files), files_left_out=left_out)
            except SandboxError as error:
                self._left_out.update(changed)
                call.outcome("failed", str(error))

    async def _read(self, sandbox: Sandbox, changed: tuple[str, ...]) -> int:
        """Reads files into the kept ones. Returns the number of files that were left out."""
        sizes = await sandbox.files()
        files = {path: file for path, file in self._policy.files.items() if path not in changed}
        left_out = set[str]()
        size = sum(map(len, files.values()))
        for path in changed:
            if path not in sizes:
                continue  # deleted

            fits = len(files) < MAX_FILES and size + sizes[path] <= self._limit
            if fits and is_inner_path(path):
                content = await sandbox.read_file(path)
                size += len(content)
                if size <= self._limit:  # the file may have grown in between
                    files[path] = content
                    continue
                size -= len(content)

            left_out.add(path)

        self._policy.keep_files(files)
        self._left_out = self._left_out.difference(changed) | left_out
        return len(left_out)
