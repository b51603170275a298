"""Sandboxes without any program to install: landlock for files, seccomp for system calls, rlimits,
and namespaces if the kernel lets this user create them.

There are four ways to confine a program. A sandbox uses the first way that passes a trial:

    namespaces        root: own processes, network, mounts; an unused user
    user namespaces   an ordinary user: the same within a user namespace
    own user          root in a container: an unused user, and no namespaces
    same user         an ordinary user without namespaces; Linux 6.12 or newer, so that landlock
                      keeps signals inside the sandbox

docs/sandbox.md lists the guarantees that the last two ways lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.environments.sandbox.inside.confine import first_closed_folder, landlock_version
from agentevo.environments.sandbox.launch import (
    INSIDE,
    PREFIX,
    SYSTEM,
    SYSTEM_FILES,
    SandboxLaunch,
    new_uid,
    package_folders,
    python_folders,
    python_program,
    supervisor_settings,
)
from agentevo.environments.sandbox.local import LocalKind
from agentevo.environments.sandbox.sandbox import sandboxes
from agentevo.environments.sandbox.seccomp import is_supported, seccomp_program
from agentevo.errors import SandboxError
from agentevo.runtime.process_folders import new_folder, remove_folder

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

WAYS = ("namespaces", "user namespaces", "own user", "same user")
SIGNAL_SCOPE_VERSION = 6
"""The first version of landlock that keeps signals inside the sandbox."""
_TRIAL_S = 20


@sandboxes.register("landlock")
class Landlock(LocalKind):
    """Landlock, seccomp and rlimits, with namespaces if possible. Nothing has to be installed."""

    name = "landlock"

    def obstacle(self) -> str:
        if sys.platform != "linux":
            return "it exists on Linux only"
        if not is_supported():
            return "there is no list of system calls for this processor"
        if landlock_version() == 0:
            return "the kernel has no landlock (Linux 5.13 or newer, with lsm=landlock)"
        if working_way():
            return ""

        reasons = "; ".join(f"{way}: {_try_way(way)}" for way in _possible_ways())
        return f"no way works here ({reasons})"

    def launch(self, section: SandboxSection) -> SandboxLaunch:
        way = working_way()
        if not way:
            raise SandboxError(f"landlock: {self.obstacle()}")
        return launch_in_way(way, section)


def launch_in_way(way: str, section: SandboxSection) -> SandboxLaunch:
    """How to start a sandbox in one of WAYS."""
    uid = new_uid() if way in ("namespaces", "own user") else None
    has_namespace = "namespaces" in way

    folder = new_folder(PREFIX)
    if uid is not None:
        os.chown(folder, uid, uid)

    packages = package_folders() if section.packages else []
    argv, filter_fd = _confine_command(
        way, folder, uid, packages, section.disk_mib, section.max_files
    )
    settings = supervisor_settings(
        section, work=str(folder), counts_processes=has_namespace or uid is not None
    )

    return SandboxLaunch(
        [*argv, python_program(), "-I", "-S", "-B", str(INSIDE / "supervisor.py")],
        settings,
        pass_fds=(filter_fd,),
        owned_uid=uid,
        folder=None if has_namespace else folder,
        work=str(folder),
        has_namespace=has_namespace,
        clean=lambda: remove_folder(folder),
    )


def _confine_command(
    way: str, folder: Path, uid: int | None, packages: list[str], disk_mib: int, max_files: int
) -> tuple[list[str], int]:
    """The command that confines and starts the program, and the file descriptor of the seccomp
    filter, which the command inherits."""
    filter_fd, write = os.pipe()
    os.write(write, seccomp_program(keeps_attributes=way == "same user"))
    os.close(write)

    visible = [*python_folders(), *packages, str(INSIDE)]
    unreachable = [path for path in visible if uid is not None and first_closed_folder(path)]
    settings = {
        "filter": filter_fd,
        "namespaces": "namespaces" in way,
        "user_namespace": way == "user namespaces",
        "uid": uid,
        "work": str(folder),
        "disk_mib": disk_mib,
        "max_files": max_files,
        "readable": [*SYSTEM, *SYSTEM_FILES, *visible],
        "unreachable": unreachable,
    }
    command = [python_program(), "-I", "-S", "-B", str(INSIDE / "confine.py"), json.dumps(settings)]
    return command, filter_fd


@cache
def working_way() -> str:
    """The first of WAYS that works on this machine, or an empty text."""
    return next((way for way in _possible_ways() if not _try_way(way)), "")


def _possible_ways() -> list[str]:
    if os.geteuid() == 0:
        return ["namespaces", "own user"]
    return [
        "user namespaces",
        *(["same user"] if landlock_version() >= SIGNAL_SCOPE_VERSION else []),
    ]


@cache
def _try_way(way: str) -> str:
    """Tries one of WAYS. Returns the reason if it does not work, else an empty text."""
    folder = new_folder(PREFIX)
    uid = new_uid() if way in ("namespaces", "own user") else None
    try:
        if uid is not None:
            os.chown(folder, uid, uid)

        argv, filter_fd = _confine_command(way, folder, uid, [], 1, 100)
        try:
            trial = subprocess.run(
                [*argv, python_program(), "-I", "-S", "-c", _trial_program(folder)],
                capture_output=True,
                timeout=_TRIAL_S,
                check=False,
                cwd="/",
                env={},
                pass_fds=(filter_fd,),
            )
        finally:
            os.close(filter_fd)
    finally:
        remove_folder(folder)

    error_lines = trial.stderr.decode("utf-8", "replace").strip().splitlines()
    return "" if trial.returncode == 0 else (error_lines or ["the trial gave no reason"])[-1][:300]


def _trial_program(folder: Path) -> str:
    """A program that fails if it is not confined."""
    return f"""
import os
open({str(folder / "trial")!r}, "w").close()
try:
    os.listdir("/etc")
except PermissionError:
    pass
else:
    raise SystemExit("files of the host can be read")
"""
