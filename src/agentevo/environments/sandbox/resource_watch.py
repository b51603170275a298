"""Watches a sandbox's resources from the outside: the memory of all its processes together, their
number, and the files of its work folder. One thread of the host checks all sandboxes, and ends
each one that is over its limits.

The kernel's own limits act first: address space of each process, the size of a file system in
memory, the number of processes of a user. This watch covers the remaining resources.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.environments.sandbox.cgroups import OWN_TASKS
from agentevo.errors import describe_error

POLL_INTERVAL_S = 0.1
FOLDER_POLL_INTERVAL_S = 1.0
MIB = 2**20


@dataclass
class WatchedSandbox:
    """One sandbox. The watching thread calls `end` with the kind of limit and a message."""

    pid: int
    memory_mib: int
    processes: int
    disk_mib: int
    max_files: int
    folder: Path | None
    work: str
    end: Callable[[str, str], None]
    looked_at_folder: float = field(default=0.0)

    def look(self) -> None:
        tree = [self.pid, *descendants(self.pid)]
        num_tasks = sum(len(_tasks(pid)) for pid in tree)
        if num_tasks > self.processes + OWN_TASKS:
            self.end("TooManyProcesses", f"more than {self.processes} processes and threads")
            return

        limit = self.memory_mib * MIB
        if sum(map(_resident, tree)) > limit and sum(map(_proportional, tree)) > limit:
            self.end("OutOfMemory", f"more than {self.memory_mib} MiB of memory, all together")
            return

        now = time.monotonic()
        if now - self.looked_at_folder > FOLDER_POLL_INTERVAL_S:
            self.looked_at_folder = now
            self._look_at_folder(tree)

    def _look_at_folder(self, tree: list[int]) -> None:
        num_files = 0
        num_bytes = 0
        if self.folder is not None:
            for what in _entries(self.folder, self.max_files + 100):
                num_files += 1
                num_bytes += what.st_blocks * 512
        else:
            with contextlib.suppress(OSError):
                inside = os.statvfs(f"/proc/{tree[-1]}/root{self.work}")
                num_files = inside.f_files - inside.f_ffree

        if num_files > self.max_files + 16:
            self.end("DiskFull", f"more than {self.max_files} files")
        elif num_bytes > self.disk_mib * MIB:
            self.end("DiskFull", f"more than {self.disk_mib} MiB of files")


class SandboxWatch:
    """The thread, which runs while there are sandboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, WatchedSandbox] = {}
        self._thread: threading.Thread | None = None

    def add(self, watched: WatchedSandbox) -> None:
        with self._lock:
            self._watched[watched.pid] = watched
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="agentevo sandboxes", daemon=True
                )
                self._thread.start()

    def remove(self, pid: int) -> None:
        """Stops watching the sandbox. `end` is no longer called."""
        with self._lock:
            self._watched.pop(pid, None)

    def _run(self) -> None:
        while True:
            time.sleep(POLL_INTERVAL_S)
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
                watched = list(self._watched.values())

            for sandbox in watched:
                try:
                    sandbox.look()
                except OSError:  # the sandbox is just ending
                    continue
                except Exception as error:  # noqa: BLE001 (others are watched on)
                    sandbox.end(
                        "SandboxDied", f"a state that can't be read ({describe_error(error)})"
                    )


watch = SandboxWatch()


def descendants(pid: int) -> list[int]:
    """The descendants of this process, nearer ones first."""
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        for task in _tasks(parent):
            with contextlib.suppress(OSError, ValueError):
                text = Path(f"/proc/{parent}/task/{task}/children").read_text()
                children = [int(word) for word in text.split()]
                pids += children
                waiting += children

        if len(pids) > 100_000:
            break

    return pids


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _resident(pid: int) -> int:
    """The resident memory of a process in bytes: anonymous and shared memory, without files."""
    return _sum_of(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:"))


def _proportional(pid: int) -> int:
    """As `_resident`, but each shared page is divided among its processes."""
    path = f"/proc/{pid}/smaps_rollup"
    return _sum_of(path, (b"Pss_Anon:", b"Pss_Shmem:")) or _resident(pid)


def _sum_of(path: str, names: tuple[bytes, ...]) -> int:
    """The sum in bytes of the lines with these names, whose values are in KiB. The file may have
    any bytes, because the code chooses the names of its processes, but a name has no line break."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def _entries(folder: Path, most: int) -> Iterator[os.stat_result]:
    folders = [str(folder)]
    num_found = 0
    while folders and num_found < most:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    what = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    num_found += 1
                    yield what
