"""Runs a user's blocking code on a separate thread, so code that hangs blocks only its caller.

A thread has the context of its caller, so calls that are recorded in it (store/call_log.py) belong
to the attempt. A thread can't be killed. A thread without a waiting caller is abandoned, and a
process tolerates MAX_ABANDONED such threads that never end.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from agentevo.errors import AgentEvoError, OverreachError
from agentevo.runtime.tracebacks import format_stack

T = TypeVar("T")

MAX_ABANDONED = 500
"""The maximum number of abandoned threads in a process."""

_abandoned: set[threading.Thread] = set()


class DedicatedThread:
    """Runs functions one after the other on the same thread, because some objects require that.
    `who` names the code's owner in messages, such as "agent"."""

    def __init__(self, who: str) -> None:
        """Raises AgentEvoError if too many threads are abandoned already."""
        _abandoned.intersection_update(threading.enumerate())
        if len(_abandoned) >= MAX_ABANDONED:
            raise AgentEvoError(
                f"{len(_abandoned)} {who}s of attempts that have ended still run and keep their "
                "threads: give each of their waits a deadline, and restart this process"
            )

        self._who = who
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given_up: Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, name=who, daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether an abandoned call still runs."""
        return self._given_up is not None and not self._given_up.done()

    async def call(self, function: Callable[[], T]) -> T:
        """Calls the function, and returns its result or raises its exception. If the call is
        cancelled, the thread is abandoned."""
        answer = self._ask(function)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._leave_unless_done(answer)

    def call_now(self, function: Callable[[], T], within_s: float) -> T:
        """Like `call`, outside of an event loop. Raises TimeoutError if the call takes longer than
        `within_s` seconds."""
        answer = self._ask(function)
        try:
            _, waiting = wait([answer], timeout=within_s)
        finally:
            self._leave_unless_done(answer)

        if waiting:
            late = TimeoutError(f"it did not return within {within_s:g} s")
            if places := self.format_stack():
                late.add_note(f"It stands at:\n{places}")
            raise late
        return answer.result()

    def format_stack(self) -> str:
        """The thread's current place in a user's code, see tracebacks.format_stack."""
        return format_stack(self._thread.ident or 0)

    def has_ended(self, within_s: float) -> bool:
        """Whether the thread has ended. Waits at most that long."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def end(self, last: Callable[[], object] = lambda: None) -> None:
        """Ends the thread, which runs `last` after its calls. No caller waits for the end."""

        def work() -> None:
            with suppress(BaseException):
                last()

        self._calls.put(work)
        self._calls.put(None)

    def _ask(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        context = contextvars.copy_context()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # no caller waits for the call, and it has not started

            try:
                result = context.run(function)
            except BaseException as error:  # noqa: BLE001 (handed to the waiting caller)
                answer.set_exception(self._as_failure(error))
            else:
                answer.set_result(result)

        self._calls.put(work)
        return answer

    def _leave_unless_done(self, answer: Future[Any]) -> None:
        if not answer.done():
            self._given_up = answer
            _abandoned.add(self._thread)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _as_failure(self, error: BaseException) -> Exception:
        """The exception in a form that a coroutine may raise and that fails only its attempt."""
        article = "an" if self._who[0] in "aeiou" else "a"
        if isinstance(error, StopIteration):
            failure: Exception = RuntimeError(
                f"the {self._who} raised StopIteration({error.value!r})"
            )
        elif isinstance(error, Exception):
            return error
        else:
            failure = OverreachError(error, f"{article} {self._who}")

        failure.__cause__ = error
        return failure


async def run_in_thread(function: Callable[[], T], who: str) -> T:
    """Runs the function on a new thread. Returns its result, or raises its exception."""
    thread = DedicatedThread(who)
    try:
        return await thread.call(function)
    finally:
        thread.end()


def call_in_thread(function: Callable[[], T], who: str, within_s: float) -> T:
    """Like `run_in_thread`, outside of an event loop. Raises TimeoutError if the call takes longer
    than `within_s` seconds."""
    thread = DedicatedThread(who)
    try:
        return thread.call_now(function, within_s)
    finally:
        thread.end()
