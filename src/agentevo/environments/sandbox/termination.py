"""Ends everything that runs in a sandbox, from the host."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from agentevo.environments.sandbox.launch import SandboxLaunch
from agentevo.environments.sandbox.resource_watch import descendants

ENDING_S = 5.0
_POLL_INTERVAL_S = 0.005

_alive: set[tuple[int, subprocess.Popen[bytes], SandboxLaunch]] = set()
"""The sandboxes, each with the process that started it. A fork of this process inherits the set,
but not the sandboxes."""


def end_with_this_process(process: subprocess.Popen[bytes], launch: SandboxLaunch) -> None:
    """Registers the sandbox, so that it ends with this process at the latest."""
    _alive.add((os.getpid(), process, launch))


def end_all_of(process: subprocess.Popen[bytes], launch: SandboxLaunch) -> None:
    """Kills every process of a sandbox, waits for it, and deletes its folder. Blocks for a few
    seconds at most."""
    until = time.monotonic() + ENDING_S
    tree = descendants(process.pid)
    kill(process, launch)

    while time.monotonic() < until and not all(_is_dead(descendant) for descendant in tree):
        time.sleep(_POLL_INTERVAL_S / 5)

    if launch.owned_uid is not None:
        _end_user(launch.owned_uid, until)
    if launch.group is not None:
        launch.group.end(until)

    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)

    if process.stderr is not None:
        process.stderr.close()

    launch.clean()
    _alive.discard((os.getpid(), process, launch))


def kill(process: subprocess.Popen[bytes], launch: SandboxLaunch) -> None:
    """Kills every process of a sandbox. Without a separate namespace this can take some
    seconds."""
    if process.poll() is None:
        if launch.has_namespace:
            # The namespace's first process is among these processes, and all others end with it.
            # Ending bubblewrap does not end it, since bubblewrap can't signal a process of another
            # user.
            for descendant in descendants(process.pid):
                _kill(descendant)
        else:
            _end_descendants(process.pid, time.monotonic() + ENDING_S / 2)

    process.kill()


def _end_descendants(pid: int, until: float) -> None:
    """Kills the supervisor last: without a namespace, it adopts orphans."""
    while time.monotonic() < until:
        living = [descendant for descendant in descendants(pid) if not _is_dead(descendant)]
        if not living:
            return
        for survivor in living:
            _kill(survivor)
        time.sleep(_POLL_INTERVAL_S)


def _end_user(uid: int, until: float) -> None:
    while time.monotonic() < until:
        living = [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and _is_of(path, uid) and not _is_dead(int(path.name))
        ]
        if not living:
            return

        for survivor in living:
            _kill(survivor)

        time.sleep(_POLL_INTERVAL_S)


def _is_of(process: Path, uid: int) -> bool:
    try:
        status = (process / "status").read_bytes()  # the file's name may not be text
    except OSError:
        return False
    return f"\nUid:\t{uid}\t".encode() in status


def _is_dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in (b"Z", b"X")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


@atexit.register
def _end_everything() -> None:
    for owner, process, launch in list(_alive):
        if owner == os.getpid():
            end_all_of(process, launch)
