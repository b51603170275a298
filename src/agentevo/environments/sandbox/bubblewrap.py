"""Sandboxes by bubblewrap: separate namespaces, and a read-only file system that contains only
the system's programs and this Python.

As root it creates namespaces without a user namespace, and the supervisor becomes an unused user,
because process limits do not apply to root. As an ordinary user, or as root if that is not
permitted, it creates a user namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from agentevo.environments.sandbox.launch import (
    INSIDE,
    SYSTEM,
    SYSTEM_FILES,
    SandboxLaunch,
    hidden_folders,
    is_below,
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

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection

INSTALL = "install it (apt-get install bubblewrap, dnf install bubblewrap, apk add bubblewrap)"
OWN_FOLDERS = ("/sandbox", "/agentevo")
"""The paths inside the sandbox of the work folder, and of the supervisor's program."""
_SHARED_MIB = 16
_TRIAL_S = 20


@sandboxes.register("bubblewrap")
class Bubblewrap(LocalKind):
    """Namespaces, a separate file system, seccomp and rlimits, by the program `bwrap`."""

    name = "bubblewrap"

    def obstacle(self) -> str:
        program = shutil.which("bwrap")
        if program is None:
            return f"there is no program `bwrap`: {INSTALL}"
        if not is_supported():
            return "there is no list of system calls for this processor"

        return (
            ""
            if working_way(program)
            else f"`bwrap` can't create namespaces here: {_complaint(program)}"
        )

    def launch(self, section: SandboxSection) -> SandboxLaunch:
        program = shutil.which("bwrap")
        way = working_way(program) if program else ""
        if program is None or not way:
            raise SandboxError(f"bubblewrap: {self.obstacle()}")

        uid = new_uid() if os.geteuid() == 0 else None
        read, write = os.pipe()
        os.write(write, seccomp_program())  # the filter is smaller than a pipe's buffer
        os.close(write)
        argv = [
            program,
            *namespace_words(way),
            *visible_words(section.disk_mib, packages=section.packages),
            "--seccomp",
            str(read),
            "--as-pid-1",
            "--",
            python_program(),
            "-I",
            "-S",
            "-B",
            "/agentevo/supervisor.py",
        ]
        is_root = way == "root"
        settings = supervisor_settings(section, work="/sandbox", uid=uid if is_root else None)

        return SandboxLaunch(
            argv, settings, pass_fds=(read,), uid=None if is_root else uid, owned_uid=uid
        )


def namespace_words(way: str) -> list[str]:
    """The arguments for separate namespaces, for a result of `working_way`."""
    ways = {
        "root": "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
        "--cap-add CAP_SETUID --cap-add CAP_SETGID",
        "user": "--unshare-all --unshare-user --uid 1000 --gid 1000",
    }
    return [
        *ways[way].split(),
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--hostname",
        "sandbox",
    ]


@cache
def working_way(program: str) -> str:
    """The way that works here: `root` or `user`. Empty if neither works."""
    ways = ["root", "user"] if os.geteuid() == 0 else ["user"]
    return next((way for way in ways if _try_way(program, way).returncode == 0), "")


def _complaint(program: str) -> str:
    error_text = _try_way(program, "user").stderr.decode("utf-8", "replace").strip()
    return (error_text.splitlines() or ["it gives no reason"])[-1][:300]


@cache
def _try_way(program: str, way: str) -> subprocess.CompletedProcess[bytes]:
    argv = [program, *namespace_words(way), "--ro-bind", "/usr", "/usr"]
    argv += [part for path in SYSTEM[1:] for part in _system_folder(path)]
    uid = new_uid() if os.geteuid() == 0 and way == "user" else None
    argv += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--size",
        "65536",
        "--tmpfs",
        "/sandbox",
        "--as-pid-1",
    ]

    return subprocess.run(
        [*argv, "--as-pid-1", "--", "/usr/bin/env", "-i"],
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
        capture_output=True,
        timeout=_TRIAL_S,
        check=False,
        cwd="/",
        env={},
    )


def _system_folder(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if os.path.isdir(path) else []


def visible_words(
    disk_mib: int, *, packages: bool, read_only: Sequence[str] = (), read_write: Sequence[str] = ()
) -> list[str]:
    """The arguments for a separate file system: the system's files, this Python (with its
    `packages`), and the named paths of the host. Raises SandboxError for a Python that can't be
    shown."""
    folders = [*python_folders(), *(package_folders() if packages else []), *read_only]
    if any(is_below(path, OWN_FOLDERS) for path in folders):
        raise SandboxError(f"this Python is below {' or '.join(OWN_FOLDERS)}: install it elsewhere")

    parts: list[str] = []
    for path in _parent_folders([*folders, *read_write, *SYSTEM_FILES]):
        parts += ["--perms", "0755", "--dir", path]
    for path in SYSTEM:
        parts += _system_folder(path)
    for path in folders:
        parts += ["--ro-bind", path, path]
    for path in read_write:
        parts += ["--bind", path, path]
    for path in SYSTEM_FILES:
        parts += ["--ro-bind-try", path, path]
    for path in [] if packages else hidden_folders():
        parts += ["--perms", "0755", "--tmpfs", path, "--remount-ro", path]

    parts += ["--ro-bind", str(INSIDE), "/agentevo", "--proc", "/proc", "--dev", "/dev"]
    parts += _memory_folder("/dev/shm", _SHARED_MIB) + _memory_folder("/sandbox", disk_mib)
    if not any(is_below(path, ("/tmp",)) for path in [*folders, *read_write]):
        parts += ["--symlink", "/sandbox/.tmp", "/tmp"]

    return [*parts, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/sandbox"]


def _memory_folder(path: str, mib: int) -> list[str]:
    return ["--perms", "1777", "--size", str(mib * 2**20), "--tmpfs", path]


def _parent_folders(paths: list[str]) -> list[str]:
    """The parent folders, from the root on. Otherwise bubblewrap would make them unreadable."""
    folders: list[str] = []
    for path in paths:
        parts = path.split("/")[1:-1]
        for index in range(len(parts)):
            above = "/" + "/".join(parts[: index + 1])
            if above not in folders and above != "/usr" and not above.startswith("/usr/"):
                folders.append(above)

    return folders
