"""Runs an environment on its own thread, so that an environment that hangs fails only its attempt.

Calls of quick environments block the event loop, so that the next turns of all attempts join one
step of the engine. If a kind of environment is mostly slow, the event loop runs during its calls.
It also runs during any call after GRACE_S. All calls of an environment run on the same thread, as
some require, in the caller's context, so that a server can identify the attempt (trace_header.py).
A thread can't be killed. A thread that never returns stays until the process ends, and the number
of such threads in a process is limited.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from agentevo.environments import TextEnvironment
from agentevo.errors import ConfigError, EnvironmentFailure, OverreachError, describe_error
from agentevo.runtime.tracebacks import describe_failure, format_stack
from agentevo.store.call_log import record_call

T = TypeVar("T")

SLOW_S = 0.05
"""A call that takes longer counts as slow. With many concurrent attempts, blocking the event loop
that long costs more than a fixed order of events is worth."""
GRACE_S = 0.25
"""The longest time to block the event loop. It allows for a quick environment on a busy machine."""
SLOW_CALLS = 3.0
"""The number of slow calls after which a kind of environment counts as slow; every 1 / FORGOTTEN
quick calls cancel one slow call."""
FORGOTTEN = 0.05
CLOSE_S = 2.0
"""The longest wait for an environment to close. The finished episode counts in any case."""
MAX_HUNG = 500
"""The maximum number of environments that hang in one process."""

_hung: set[EnvironmentThread] = set()
"""Abandoned threads with a call, possibly `close`, that has not returned."""


class Pace:
    """The speed of a kind of environment, from its calls so far."""

    def __init__(self) -> None:
        self._slow_calls = 0.0

    @property
    def grace_s(self) -> float:
        """How long the next call can block the event loop."""
        return GRACE_S if self._slow_calls < SLOW_CALLS else 0.0

    def record_duration(self, seconds: float) -> None:
        """Records the duration of one call."""
        change = 1.0 if seconds > SLOW_S else -FORGOTTEN
        self._slow_calls = min(max(self._slow_calls + change, 0.0), SLOW_CALLS + 1.0)


class EnvironmentThread:
    """See the module. All environments of a kind share a `pace`."""

    def __init__(self, pace: Pace, who: str = "an environment") -> None:
        """`who`: the caller's name in errors. Raises EnvironmentFailure if too many environments
        hang."""
        if len(_hung) >= MAX_HUNG:
            raise EnvironmentFailure(
                f"{len(_hung)} environments of this process hang and keep their threads: give "
                "their tools deadlines, and start the run again"
            )

        self._pace = pace
        self._who = who
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pending: Future[Any] | None = None
        self.last_call_s = 0.0
        """The duration of the last call that returned, in seconds."""
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned yet."""
        return self._pending is not None and not self._pending.done()

    async def call(
        self, function: Callable[[], T], name: str | None = None, *, within_s: float | None = None
    ) -> T:
        """Returns or raises what the function does. With a name it is recorded as a call of the
        environment, from the time at which it no longer blocks the event loop. Raises TimeoutError
        after `within_s`: the call then counts as hanging."""
        answer = self._ask(function)
        await self._wait(answer, name, within_s=within_s)
        return answer.result()

    def call_now(self, function: Callable[[], T], within_s: float) -> T:
        """As `call`, outside of an event loop. Raises EnvironmentFailure if it takes longer."""
        answer = self._ask(function)
        try:
            error = answer.exception(timeout=within_s)
        except TimeoutError:
            late = EnvironmentFailure(
                f"the environment hangs: no answer in agent.timeout_s={within_s:g} s"
            )
            if places := format_stack(self._thread.ident or 0):
                late.add_note(f"It is at:\n{places}")
            raise late from None

        if error is not None:
            raise error

        return answer.result()

    def end_now(self, close: Callable[[], None]) -> str | None:
        """As `end`, outside of an event loop. Returns the reason if the close failed, which has no
        other effect."""
        idle = not self.is_busy
        closing = self._ask(close)
        error: BaseException | None = EnvironmentFailure("one of its calls hangs")
        try:
            if idle:
                error = closing.exception(timeout=CLOSE_S)
        except TimeoutError:
            error = EnvironmentFailure(f"its close() hangs: no answer in {CLOSE_S:g} s")

        if not closing.done():
            _hung.add(self)

        self._calls.put(None)
        return None if error is None else describe_error(error)

    async def end(self, close: Callable[[], None]) -> None:
        """Makes `close` the last call. Does not wait while another call hangs, and waits at most
        CLOSE_S. Raises what `close` raises in that time."""
        idle = not self.is_busy
        closing = self._ask(close)
        try:
            if idle:
                with suppress(TimeoutError):
                    await self._wait(closing, None, within_s=CLOSE_S)
        finally:
            if not closing.done():
                _hung.add(self)  # before the thread can end and remove itself
            self._calls.put(None)

        if idle and closing.done():
            closing.result()

    def _ask(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._pending = answer
        context = contextvars.copy_context()
        self._calls.put((answer, lambda: context.run(function)))
        return answer

    async def _wait(
        self, answer: Future[Any], name: str | None, *, within_s: float | None = None
    ) -> None:
        grace_s = self._pace.grace_s if within_s is None else min(self._pace.grace_s, within_s)
        try:
            answer.exception(timeout=grace_s)
        except TimeoutError:
            rest_s = None if within_s is None else within_s - grace_s
            with record_call("environment", name) if name is not None else nullcontext():
                await asyncio.wait([asyncio.wrap_future(answer)], timeout=rest_s)
                if not answer.done():
                    raise TimeoutError from None

    def _work(self) -> None:
        while (queued := self._calls.get()) is not None:
            answer, function = queued
            answer.set_running_or_notify_cancel()
            started = time.monotonic()
            try:
                try:
                    result = function()
                finally:
                    self.last_call_s = time.monotonic() - started
                    self._pace.record_duration(self.last_call_s)
            except BaseException as error:  # noqa: BLE001 (passed to the waiter)
                answer.set_exception(_as_failure(error, self._who))
            else:
                answer.set_result(result)

        _hung.discard(self)


def _as_failure(error: BaseException, who: str) -> Exception:
    """Converts an exception to one that a coroutine can raise and that fails only its attempt."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = OverreachError(error, who)
    failure.__cause__ = error
    return failure


MAX_HUNG_ALONE = 3
"""After this many environments hang, no further environment is tried."""


class SoloEnvironment:
    """Runs an environment outside of attempts and event loops: in the checks before a run, for the
    vocabulary of a tiny policy, and for demonstrations. As in an attempt, any exception becomes an
    EnvironmentFailure, and an environment that hangs is abandoned.

    The time limit of every call is `within_s`. If close() fails, `note` gets a
        message, and there is no other effect."""

    def __init__(
        self, make: Callable[[], TextEnvironment], *, within_s: float, note: Callable[[str], None]
    ) -> None:
        """Raises ConfigError for an environment that can't be made."""
        self._make = make
        self._within_s = within_s
        self._note = note
        self._num_hung = 0
        self._begin()

    def _begin(self) -> None:
        self._thread = EnvironmentThread(Pace())
        self._made: list[TextEnvironment] = []
        environments = self._made
        try:
            self._thread.call_now(lambda: environments.append(self._make()), self._within_s)
        except ConfigError:
            self._thread.end_now(partial(_close_all, self._made))
            raise
        except Exception as error:
            self._thread.end_now(partial(_close_all, self._made))
            raise ConfigError(
                f"environment: it can't be made: {describe_failure(error)}"
            ) from error

    @property
    def name(self) -> str:
        return type(self._made[0]).__name__

    def call(self, work: Callable[[TextEnvironment], T]) -> T:
        """Calls `work` with the environment, or with a new one if the last one hung, and returns
        the result. Raises EnvironmentFailure."""
        if self._thread.is_busy:
            self._thread.end_now(partial(_close_all, self._made))
            self._num_hung += 1
            if self._num_hung < MAX_HUNG_ALONE:
                self._begin()

        if self._num_hung >= MAX_HUNG_ALONE:
            raise EnvironmentFailure(f"{self.name} has hung {self._num_hung} times")

        try:
            return self._thread.call_now(lambda: work(self._made[0]), self._within_s)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(describe_error(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        problem = self._thread.end_now(partial(_close_all, self._made))
        if problem is not None:
            self._note(f"the environment {self.name} was not closed properly: {problem}")


def _close_all(environments: list[TextEnvironment]) -> None:
    for environment in environments:
        environment.close()
