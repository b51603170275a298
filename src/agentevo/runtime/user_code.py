"""Loads a user's code before anything is played: the modules of `import` and of packages, and the
constructors of agents and rewards.

The code runs on the thread of the caller. Libraries need the main thread, and an SQLite connection
or a client of an event loop belongs to the thread that created it. If the code has not ended after
NOTICE_S seconds, a line reports its place. At the deadline, SIGALRM raises an exception inside the
code, which ends a sleep, a wait on a socket and a loop. If the code continues for another GRACE_S
seconds (a bare `except`, a call of native code), the process ends with code 2.

Not guaranteed: a thread other than the main thread receives no signals. Its place is reported at
the deadline, and the caller waits for it. Native code that never releases Python's lock is not
detected.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from agentevo.errors import AgentEvoError, ConfigError, LoadingTimeoutError
from agentevo.runtime.console import to_stderr
from agentevo.runtime.tracebacks import describe_failure, format_places, format_stack

T = TypeVar("T")

VARIABLE = "AGENTEVO_LOADING_S"
"""The environment variable that sets another time limit."""
LOADING_TIMEOUT_S = 600.0
NOTICE_S = 30.0
REPEAT_S = 1.0
"""The time in seconds from a swallowed signal to the next one."""
GRACE_S = 10.0


class _Overdue(BaseException):
    """Raised inside overdue code. It is not an Exception, because a loop that retries after every
    Exception would swallow it."""


def load_in_time(work: Callable[[], T], what: str) -> T:
    """Runs `work`, a user's code, and returns its result or raises its exception. `what` begins the
    messages, such as "import: ./my_agent.py". Raises LoadingTimeoutError after LOADING_TIMEOUT_S,
    or the seconds of VARIABLE."""
    watch = _Watch(what, _longest_s())
    try:
        watch.begin()
        try:
            return work()
        finally:
            watch.end()
    except _Overdue as error:
        watch.end()
        raise LoadingTimeoutError(watch.message(format_places(error))) from None


def construct(make: Callable[[], T], where: str, name: str) -> T:
    """Creates an object of a user's class with the name `name`, within the time limit. `where`: the
    key that names the class. Raises ConfigError with the constructor's error."""
    try:
        return load_in_time(make, f"{where}: the constructor of {name}")
    except (ConfigError, KeyboardInterrupt):
        raise
    except AgentEvoError as error:
        raise ConfigError(f"{where}: {error}") from error
    except BaseException as error:  # includes SystemExit, and any other error of a user's code
        raise ConfigError(
            f"{where}: {name} can't be made of its options: {describe_failure(error)}"
        ) from error


def _longest_s() -> float:
    text = os.environ.get(VARIABLE)
    if text is None:
        return LOADING_TIMEOUT_S

    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{VARIABLE}={text!r}: give a number of seconds above 0, such as 3600")

    return seconds


class _Watch:
    """The deadline of a piece of code. Watches may be nested."""

    def __init__(self, what: str, longest_s: float) -> None:
        self._what = what
        self._longest_s = longest_s
        self._watched = threading.get_ident()
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        self._is_over = False
        self._ended = threading.Event()
        self._started = time.monotonic()
        self._handler = self._handle
        self._handler_before: Any = None
        self._timer_before = (0.0, 0.0)

    def begin(self) -> None:
        """Starts the clock."""
        threading.Thread(target=self._watch, name="loading deadline", daemon=True).start()
        if self._can_interrupt:
            self._handler_before = signal.signal(signal.SIGALRM, self._handler)
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, self._longest_s, REPEAT_S)

    def end(self) -> None:
        """Stops the clock, and restores the signal's handler unless the code installed its own. May
        be called again."""
        self._is_over = True
        self._ended.set()
        if not self._can_interrupt or signal.getsignal(signal.SIGALRM) is not self._handler:
            return

        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler_before or signal.SIG_DFL)
        delay_s, interval_s = self._timer_before
        if delay_s > 0:
            left_s = delay_s - (time.monotonic() - self._started)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001), interval_s)

    def message(self, places: str) -> str:
        """The message at the deadline."""
        return (
            f"{self._what} has not ended within {self._longest_s:g} s ({VARIABLE}=SECONDS allows "
            f"more). It is now at:\n{places}"
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_over:
            raise _Overdue(f"it has not ended within {self._longest_s:g} s")

    def _watch(self) -> None:
        notice_s = min(NOTICE_S, self._longest_s)
        if self._ended.wait(notice_s):
            return
        if notice_s < self._longest_s:
            to_stderr(
                f"{self._what} takes long: the limit is {self._longest_s:g} s. It is now at:\n"
                f"{self._places()}"
            )

        if self._ended.wait(self._longest_s - notice_s):
            return
        if not self._can_interrupt:
            to_stderr(self.message(self._places()))
        elif not self._ended.wait(GRACE_S):
            to_stderr(f"{self.message(self._places())}\nIt can't be interrupted: the process ends")
            sys.stdout.flush()
            os._exit(2)

    def _places(self) -> str:
        return format_stack(self._watched, below=load_in_time.__code__)
