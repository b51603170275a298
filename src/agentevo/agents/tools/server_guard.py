"""Runs between this process and a server that it starts, and ends all processes of that server.

Run as `python -I -S server_guard.py CLIENT PROGRAM...`, with the id of the client's process. The
server has the guard's stdin, stdout and stderr. A process that loses its parent becomes the guard's
child (PR_SET_CHILD_SUBREAPER), even one that has left the session, so nothing outlives the guard.
Without Linux only the server's process group ends with it.

SIGTERM, and the end of the client for any reason, have the same effect as the end of stdin. The
server then has GRACE_S to end, and the same time again after it gets SIGTERM. Processes that still
run are killed. The program may end earlier and leave the server running, because some programs only
start a server.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 2.0
POLL_INTERVAL_S = 0.5
"""The interval of the checks whether the client is alive."""
NOT_STARTED = 127
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main() -> int:
    """Runs the program and returns its exit code: 128 plus the signal's number if a signal ended
    it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    client = int(sys.argv[1])
    program = _start(sys.argv[2:])
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # a reader of these pipes waits until they are closed
        os.dup2(nothing, number)

    return _guard(program, client)


def _start(words: list[str]) -> int:
    """Starts the program and returns its process id."""
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
        try:
            os.execvp(words[0], words)
        except OSError as error:
            os.write(2, f"{words[0]} can't be started: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)
    return program


def _guard(program: int, client: int) -> int:
    code = 0
    has_ended = False
    closing_since: float | None = None
    was_signalled = False
    while True:
        signal_number = _wait(POLL_INTERVAL_S)
        exit_codes = _reap()
        if program in exit_codes:
            code = exit_codes[program]
            has_ended = True

        if not _has_children():
            return code

        is_closed = signal_number not in (None, signal.SIGCHLD) or os.getppid() != client
        if closing_since is None and is_closed:
            closing_since = time.monotonic()
            has_ended = program in exit_codes  # processes that outlive it also get their time

        if closing_since is None:
            continue

        closing_s = time.monotonic() - closing_since
        if has_ended or closing_s > 2 * GRACE_S:
            _kill_children()
            return code
        if closing_s > GRACE_S and not was_signalled:
            was_signalled = True
            os.killpg(0, signal.SIGTERM)


def _wait(limit_s: float) -> int | None:
    """Waits for the next signal, and returns its number or None."""
    if not hasattr(signal, "sigtimedwait"):  # macOS
        time.sleep(limit_s / 10)
        pending = signal.sigpending() - {signal.SIGCHLD}
        return signal.sigwait(pending) if pending else None

    info = signal.sigtimedwait(_HANDLED_SIGNALS, limit_s)
    return None if info is None else info.si_signo


def _reap() -> dict[int, int]:
    """Children that have ended -> their exit codes."""
    exit_codes: dict[int, int] = {}
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_codes
        if child == 0:
            return exit_codes

        code = os.waitstatus_to_exitcode(status)
        exit_codes[child] = code if code >= 0 else 128 - code


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill_children() -> None:
    """Kills until there are no children: the children of a killed process become the guard's."""
    until = time.monotonic() + GRACE_S
    while _has_children() and time.monotonic() < until:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = file.read().split()
        except OSError:
            os.killpg(0, signal.SIGKILL)
            return

        for child in children:
            os.kill(int(child), signal.SIGKILL)
        time.sleep(0.002)
        _reap()


if __name__ == "__main__":
    sys.exit(main())
