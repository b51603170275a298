"""Programs, such as servers, in a bubblewrap sandbox; their stdin and stdout belong to the process
that starts them.

A program has its own work folder, which is its home. It sees the system's files, its own files and
the named files, and has no network unless requested. `sandboxed` returns the command that starts
it. In this command, inside/hand_over.py passes the filter of system calls to `bwrap`, and
inside/run_limited.py sets limits and the user. Its environment variables are those of the process
that starts it, except HOME and TMPDIR. `ProgramConfinement` limit the resources of all its
processes together, as for the sandbox of code.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.environments.sandbox.bubblewrap import (
    Bubblewrap,
    namespace_words,
    visible_words,
    working_way,
)
from agentevo.environments.sandbox.cgroups import new_group
from agentevo.environments.sandbox.inside.hand_over import HANDLE
from agentevo.environments.sandbox.launch import (
    FIRST_UID,
    INSIDE,
    NUM_UIDS,
    SYSTEM,
    is_below,
    python_program,
)
from agentevo.environments.sandbox.resource_watch import WatchedSandbox, descendants, watch
from agentevo.environments.sandbox.seccomp import seccomp_program
from agentevo.errors import SandboxError

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import ProgramSandboxSection

NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")
"""The files that programs read to look up names and to verify certificates."""

NODE_MODULES = "/node_modules/"
"""The folder in which a program from npm finds its packages. Its file in `.bin` is a link into this
folder."""
MAX_FILES = 100_000
"""The most files in the work folder: even empty ones use the kernel's memory."""
ENDING_S = 2.0
_FIRST_LINE = 4096
"""The bytes at the start of a script in which its interpreter is named."""


class ProgramConfinement:
    """Limits around one program that the words of `sandboxed` start, and its children: a cgroup if
    possible, and the watch of memory, processes and files."""

    def __init__(self, section: ProgramSandboxSection) -> None:
        """Called before the program starts. Blocks for a moment. Raises SandboxError and
        OSError."""
        self._section = section
        self._group = new_group(section.memory_mib + section.disk_mib, section.processes)
        self._pid: int | None = None

    def apply(self, pid: int, notify: Callable[[str], None]) -> None:
        """Called when the program has started, before it writes anything. `notify` is called, in
        the watching thread, with the limit that ended the program. Raises OSError."""
        section = self._section
        self._pid = pid

        def end(kind: str, reason: str) -> None:
            notify(f"its sandbox ended it: {reason}")
            for process in (*descendants(pid), pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)

        watched = WatchedSandbox(
            pid,
            section.memory_mib,
            section.processes,
            section.disk_mib,
            MAX_FILES,
            None,
            "/sandbox",
            end,
        )
        watch.add(watched)
        if self._group is not None:
            self._group.add([pid])
            self._group.add(descendants(pid))

    def end(self) -> None:
        """Ends the program's processes. Blocks for at most ENDING_S."""
        if self._pid is not None:
            watch.remove(self._pid)
        if self._group is not None:
            self._group.end(time.monotonic() + ENDING_S)


def sandbox_command(
    command: str, arguments: Sequence[str], section: ProgramSandboxSection, folder: Path | None
) -> list[str]:
    """The words that start a program in a sandbox; a name with a folder is relative to `folder`.
    Raises SandboxError if there can be no sandbox, and for missing paths."""
    program = _program(command, folder)
    bwrap = shutil.which("bwrap")
    obstacle = Bubblewrap().obstacle()
    if bwrap is None or obstacle:
        raise SandboxError(f"bubblewrap: {obstacle}")

    way = working_way(bwrap)
    if way == "user" and os.geteuid() == 0:
        raise SandboxError("bubblewrap: root can't create namespaces here: run as a normal user")

    limits = {
        "RLIMIT_DATA": section.memory_mib * 2**20,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_NOFILE": 1024,
    }
    uids = None
    if way == "root":
        uids = [FIRST_UID, NUM_UIDS]  # each start has an unused user
        limits["RLIMIT_NPROC"] = section.processes

    read_only = [*_own_folders(program), *map(_existing_path, section.read_only)]
    read_only += [path for path in NETWORK_FILES if section.network and os.path.exists(path)]
    words = [
        bwrap,
        *_namespaces(way, section.network),
        *visible_words(
            section.disk_mib,
            packages=True,
            read_only=read_only,
            read_write=list(map(_existing_path, section.read_write)),
        ),
        "--setenv",
        "HOME",
        "/sandbox",
        "--setenv",
        "TMPDIR",
        "/sandbox/.tmp",
        "--seccomp",
        HANDLE,
        "--",
        python_program(),
        "-I",
        "-S",
        "-B",
        "/agentevo/run_limited.py",
        json.dumps({"limits": limits, "uids": uids}),
        program,
        *arguments,
    ]
    filter_ = base64.b64encode(seccomp_program(network=section.network)).decode()
    opener = str(INSIDE / "hand_over.py")
    return [python_program(), "-I", "-S", "-B", opener, filter_, *words]


def _namespaces(way: str, network: bool) -> list[str]:
    words = [word for word in namespace_words(way) if word != "--clearenv"]
    if not network:
        return words
    return [word for word in words if word != "--unshare-net"] + (
        ["--share-net"] if "--unshare-all" in words else []
    )


def _program(command: str, folder: Path | None) -> str:
    """The program's path. Raises SandboxError."""
    has_folder = os.path.dirname(command) and folder is not None
    path = shutil.which(os.path.join(folder, command) if has_folder and folder else command)
    if path is None:
        raise SandboxError(f"there is no program {command!r}")
    return os.path.abspath(path)


def _own_folders(program: str) -> list[str]:
    """The folders or files that a program needs: the virtual environment that contains it, or its
    file. If it is a link, the same for its target. If it is a script, the same for the interpreter
    in its first line."""
    folders = set[str]()
    waiting = [program]
    visited = set[str]()
    while waiting:
        path = waiting.pop()
        if path in visited or not os.path.exists(path):
            continue

        visited.add(path)
        above = os.path.dirname(os.path.dirname(path))
        is_in_one = os.path.exists(os.path.join(above, "pyvenv.cfg"))
        before, modules, _ = path.partition(NODE_MODULES)
        folders.add(above if is_in_one else (before + modules).rstrip("/") if modules else path)

        if os.path.islink(path):
            target = os.path.join(os.path.dirname(path), os.readlink(path))
            waiting.append(os.path.abspath(target))

        waiting += [os.path.realpath(path), *_interpreter(path)]

    if os.path.realpath(program) == python_program() and sys.prefix != sys.base_prefix:
        folders.add(sys.prefix)

    return sorted(path for path in folders if not is_below(path, SYSTEM))


def _interpreter(program: str) -> list[str]:
    """The path of a script's interpreter, if it exists. If the script uses `env`, both paths."""
    try:
        with open(program, "rb") as file:
            first = file.read(_FIRST_LINE).split(b"\n")[0]
    except OSError:
        return []
    words = os.fsdecode(first.removeprefix(b"#!")).split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [*words[:1], *filter(None, [shutil.which(named[0]) if named else None])]
    else:
        words = words[:1]
    return [word for word in words if os.path.isabs(word) and os.path.exists(word)]


def _existing_path(path: Path) -> str:
    """The absolute path. Raises SandboxError if it does not exist."""
    absolute = os.path.abspath(path.expanduser())
    if not os.path.exists(absolute):
        raise SandboxError(f"there is no {absolute} to show in the sandbox")
    return absolute
