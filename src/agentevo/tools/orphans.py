"""Ends servers whose client was killed: most end with their stdin, some go on for good.

A process that starts servers has one watcher, this file as a program, which reads from a pipe the
process groups that there are (`+ID`) and are no more (`-ID`). The pipe ends with the process,
whatever killed that; what is left of the groups GRACE_S later is killed. What left its group is not
reached.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE_S = 2.0
_watchers: dict[int, subprocess.Popen[bytes]] = {}
"""Process -> its watcher: a fork of ours has the parent's in it, and starts its own."""


def watch_group(group: int) -> None:
    """From here on the group ends with this process at the latest."""
    if os.getpid() not in _watchers:
        with suppress(OSError):
            _watchers[os.getpid()] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            atexit.register(_end_watcher, os.getpid())
    _tell(f"+{group}\n")


def forget_group(group: int) -> None:
    """It has ended."""
    _tell(f"-{group}\n")


def _tell(line: str) -> None:
    watcher = _watchers.get(os.getpid())
    if watcher is not None and watcher.stdin is not None:
        with suppress(OSError):
            watcher.stdin.write(line.encode())
            watcher.stdin.flush()


def _end_watcher(process: int) -> None:
    watcher = _watchers.pop(process, None)
    if process == os.getpid() and watcher is not None and watcher.stdin is not None:
        with suppress(OSError):
            watcher.stdin.close()
        watcher.returncode = 0  # it ends by itself, and nobody waits for it


def _watch() -> None:
    groups = set[int]()
    for line in sys.stdin:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))

    if groups:
        time.sleep(GRACE_S)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch()
