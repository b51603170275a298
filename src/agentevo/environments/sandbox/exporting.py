"""Copies the work folder of a sandbox to the host: the `export` of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.errors import SandboxError
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.files import atomic_folder

if TYPE_CHECKING:
    from agentevo.environments.sandbox.sandbox import Sandbox


async def export_files(
    sandbox: Sandbox, folder: Path, disk_mib: int, has_ended: Callable[[], bool]
) -> tuple[str, ...]:
    """See Sandbox.export. Raises SandboxError, and OSError if the folder can't be written."""
    written: list[str] = []
    paths = [path for path in await sandbox.files() if _is_inner_path(path)]
    total = 0
    with atomic_folder(folder) as staging:
        for path in paths:
            try:
                content = await sandbox.read_file(path)
            except SandboxError:
                if has_ended():
                    raise
                continue  # its name is not UTF-8, or it was deleted in between

            total += len(content)
            if total > disk_mib * 2**20:
                raise SandboxError("export: the files have more bytes than disk_mib allows")

            await in_thread(_write, staging / path, content)
            written.append(path)

    return tuple(written)


def _is_inner_path(path: str) -> bool:
    """Whether a path that the sandbox sent stays within its folder."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not any(part in ("", ".", "..") for part in parts)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
