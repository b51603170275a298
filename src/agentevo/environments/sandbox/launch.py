"""How a sandbox's process starts, and which files of this machine it sees."""

from __future__ import annotations

import os
import secrets
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.errors import SandboxError

if TYPE_CHECKING:
    from agentevo.environments.sandbox.cgroups import ControlGroup
    from agentevo.environments.sandbox.section import SandboxSection


INSIDE = Path(__file__).parent / "inside"
FIRST_UID = 1_800_000_000
"""The first user id without an account. A sandbox that root starts gets a random unused one of
these ids."""
NUM_UIDS = 100_000_000
"""The number of such ids."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
TOO_WIDE = ("/", "/home", "/root", "/opt", "/var", "/etc", "/tmp", "/mnt", "/srv", "/Users")


@dataclass(frozen=True, eq=False)
class SandboxLaunch:
    """The start of one sandbox."""

    argv: list[str]
    settings: Mapping[str, Any]
    """Settings for the supervisor, see inside/supervisor.py."""
    pass_fds: tuple[int, ...] = ()
    """Handles of this process that the new one inherits; they are closed after its start."""
    uid: int | None = None
    """The user id that starts it, if it is not this process's user."""
    owned_uid: int | None = None
    """The user id that only this sandbox's processes have."""
    folder: Path | None = None
    """A folder of the host that it writes into. Only the watch limits its size."""
    work: str = "/sandbox"
    """The work folder's path inside the sandbox."""
    has_namespace: bool = True
    """Whether all its processes end with the first."""
    clean: Callable[[], None] = field(default=lambda: None)
    """Deletes the files that it leaves on the host."""
    group: ControlGroup | None = None
    """The cgroup of all its processes."""


def new_uid() -> int:
    return FIRST_UID + secrets.randbelow(NUM_UIDS)


def python_program() -> str:
    """The real file of this Python, outside of a virtual environment."""
    return os.path.realpath(sys.executable)


def python_folders() -> list[str]:
    """Folders of this Python outside of the system's folders. Raises SandboxError if they would
    make a home folder visible."""
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    folders.add(os.path.dirname(os.path.dirname(python_program())))
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in folders:
        if folder != "/usr" and (folder in TOO_WIDE or home == folder):
            raise SandboxError(
                f"this Python is installed in {folder}, which can't be shown in a sandbox: use one "
                "in its own folder, such as one of uv, pyenv, conda or the system"
            )

    if any(folder.startswith("/nix/") for folder in folders):
        folders = {"/nix/store"}

    return sorted(folder for folder in folders if not is_below(folder, SYSTEM))


def package_folders() -> list[str]:
    """Folders of the packages that are installed for this Python."""
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    return sorted(os.path.realpath(path) for path in paths if os.path.isdir(path))


def hidden_folders() -> list[str]:
    """Folders of packages below the visible ones, for code that may not import them."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [f"{prefix}/lib/{version}/site-packages" for prefix in python_folders()]
    return [path for path in paths if os.path.isdir(path)]


def is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def supervisor_settings(
    section: SandboxSection,
    *,
    work: str,
    uid: int | None = None,
    is_alone: bool = True,
    counts_processes: bool = True,
) -> dict[str, Any]:
    """Settings for the supervisor. `is_alone`: it may end every process that it can signal.
    `counts_processes`: the kernel counts the processes of this sandbox separately."""
    packages = package_folders() if section.packages else []
    folder = os.path.dirname(python_program())
    env = {
        "HOME": work,
        "LANG": "C.UTF-8",
        "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": f"{work}/.tmp",
        "USER": "sandbox",
        **({"PYTHONPATH": ":".join(packages)} if packages else {}),
        **section.env,
    }
    limits = ("memory_mib", "cpu_s", "processes", "file_mib", "max_files", "output_kib")

    return {
        **{name: getattr(section, name) for name in limits},
        "work": work,
        "uid": uid,
        "is_alone": is_alone,
        "counts_processes": counts_processes,
        "packages": packages,
        "env": env,
    }


PREFIX = "agentevo-sandbox-"
"""The beginning of the names of work folders on the host's disk, which sandboxes without a separate
file system have. See runtime/process_folders.py."""
