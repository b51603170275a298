"""Limits that the kernel enforces for all processes of a sandbox together: one cgroup (version 2)
for each sandbox, if the system has cgroups and this user can create them.

A cgroup is an additional limit. It acts immediately, while resource_watch.py checks ten times a
second; it counts the kernel's own memory; and no process can leave it, not even a detached one. A
group is created next to this process's own, or below it, where controllers are already delegated,
so the machine's own groups do not change. A sandbox's processes are moved into the group when its
supervisor is ready, before any code of a model runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentevo.errors import SandboxError
from agentevo.runtime.process_folders import IDENTITY, is_gone, owner

CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "agentevo-sandbox-"
OWN_MIB = 32
"""The kernel's memory for a sandbox, in addition to the sandbox's own memory and files, in MiB."""
OWN_TASKS = 6
"""The number of AgentEvo's own processes in a sandbox: the wrapper, the supervisor, the
interpreter."""
_PERIOD_US = 100_000
_POLL_INTERVAL_S = 0.005
_NAME = re.compile(rf"{PREFIX}({IDENTITY})-\d+")
_finding = threading.Lock()
_numbers = itertools.count(1)


@dataclass(frozen=True)
class CgroupPlace:
    """The place for groups and their limits, or why there is none."""

    folder: Path | None
    controllers: frozenset[str] = frozenset()
    problem: str = ""


class ControlGroup:
    """The cgroup of one sandbox. Its methods can block for a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def limit(
        self, controllers: frozenset[str], memory_mib: int, processes: int, cpus: float | None
    ) -> None:
        """Sets the limits. Raises OSError."""
        if "memory" in controllers:
            self._write("memory.max", str((memory_mib + OWN_MIB) * 2**20))
            self._write("memory.oom.group", "1")
            with contextlib.suppress(FileNotFoundError):  # the kernel has no swap
                self._write("memory.swap.max", "0")

        if "pids" in controllers:
            self._write("pids.max", str(processes + OWN_TASKS))

        if "cpu" in controllers and cpus is not None:
            quota = max(1000, int(cpus * _PERIOD_US))
            self._write("cpu.max", f"{quota} {_PERIOD_US}")

    def add(self, pids: Iterable[int]) -> None:
        """Moves processes into the group. Processes that they start later are also in the group.
        Raises OSError."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._write("cgroup.procs", str(pid))

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes because the group was out of memory."""
        try:
            events = (self._folder / "memory.events").read_text()
        except OSError:
            return False
        return re.search(r"^oom_kill [1-9]", events, re.MULTILINE) is not None

    def end(self, until: float) -> None:
        """Kills the group's processes, and deletes the group. Gives up at the monotonic time
        `until`."""
        while True:
            with contextlib.suppress(OSError):
                self._write("cgroup.kill", "1")

            with contextlib.suppress(OSError):
                for inner in [*_groups_below(self._folder), self._folder]:
                    inner.rmdir()
                return

            if not self._folder.exists() or time.monotonic() > until:
                return

            time.sleep(_POLL_INTERVAL_S)

    def _write(self, name: str, text: str) -> None:
        with (self._folder / name).open("w") as file:  # only the kernel creates these files
            file.write(text)


def new_group(memory_mib: int, processes: int, cpus: float | None = None) -> ControlGroup | None:
    """Creates a group with these limits; `memory_mib` includes the work folder. None if none can be
    created. Raises SandboxError if `cpus` needs one, and OSError."""
    parent_group = place()
    if cpus is not None and "cpu" not in parent_group.controllers:
        why = parent_group.problem or "the cpu controller is not delegated"
        raise SandboxError(f"sandbox.cpus needs cgroups of version 2 ({why}): leave it out")

    if parent_group.folder is None:
        return None

    _remove_stale(parent_group.folder)
    folder = parent_group.folder / f"{PREFIX}{owner()}-{next(_numbers)}"
    folder.mkdir()
    group = ControlGroup(folder)
    try:
        group.limit(parent_group.controllers, memory_mib, processes, cpus)
    except OSError:
        group.end(time.monotonic())
        raise

    return group


def place() -> CgroupPlace:
    """Finds the place for groups on this machine, by creating a group and moving a process into it.
    Thread-safe."""
    with _finding:  # two trials at once would use the same name and fail
        return _find_place()


@cache
def _find_place() -> CgroupPlace:
    try:
        folders = _own_folders()
    except OSError as error:
        return CgroupPlace(None, problem=f"there are no cgroups: {error.strerror or error}")

    if not folders:
        return CgroupPlace(None, problem="the system has no cgroups of version 2")

    problem = f"neither memory nor pids is delegated to groups in {folders[-1]}"
    for folder in folders:
        try:
            handed_down = set((folder / "cgroup.subtree_control").read_text().split())
            controllers = frozenset(handed_down & set(CONTROLLERS))
            if controllers & {"memory", "pids"}:
                _try(folder)
                return CgroupPlace(folder, controllers)
        except OSError as error:
            problem = f"{folder}: {error.strerror or error}"

    return CgroupPlace(None, problem=problem)


def _own_folders() -> list[Path]:
    """The folder of this process's own group, and the folders above it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group_path = next((line[3:] for line in lines if line.startswith("0::")), None)
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = mount.partition(" - ")
        if group_path is None or after.split()[:1] != ["cgroup2"]:
            continue

        root, top = (_unescape(word) for word in before.split()[3:5])
        if group_path != root and not group_path.startswith(root.rstrip("/") + "/"):
            continue  # this mount shows another part of the tree

        folder = Path(top) / group_path[len(root.rstrip("/")) :].strip("/")
        return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]

    return []


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word)


def _try(folder: Path) -> None:
    """Raises OSError if a group can't be created there, or a process can't be moved into it."""
    group = ControlGroup(folder / f"{PREFIX}{owner()}-0")
    group._folder.mkdir()
    try:
        with subprocess.Popen(["/bin/sleep", "60"], cwd="/") as sleeping:
            try:
                group._write("cgroup.procs", str(sleeping.pid))
            finally:
                sleeping.kill()
    finally:
        group.end(time.monotonic() + 2.0)


def _groups_below(folder: Path) -> list[Path]:
    """The groups below it, inner ones first. Sandboxed code with access could have created them, in
    any depth."""
    groups = [folder]
    for group in groups:
        with contextlib.suppress(OSError), os.scandir(group) as entries:
            groups += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return groups[:0:-1]


def _remove_stale(folder: Path) -> None:
    """Ends the groups of killed processes, with the processes that they left running."""
    with contextlib.suppress(OSError):
        for group_folder in folder.iterdir():
            match = _NAME.fullmatch(group_folder.name)
            if match is not None and is_gone(match[1]):
                ControlGroup(group_folder).end(time.monotonic() + 1.0)
