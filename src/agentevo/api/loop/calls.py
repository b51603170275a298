"""Calls from other threads' event loops to the event loop of a run, which may end at any moment.
Invariant: every caller gets the result, or the reason why the run has ended. Every coroutine is
started, and a closed event loop receives nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from agentevo.errors import EngineUnavailableError

T = TypeVar("T")


class Calls:
    """See the module. Its methods may be called on any thread."""

    def __init__(self, make_end_error: Callable[[], Exception]) -> None:
        """`make_end_error`: gives a new exception that says why the run has ended."""
        self._ended = make_end_error
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False
        """Whether no further call is accepted."""
        self._open: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}

    def begin(self) -> None:
        """From now on calls go to the current event loop."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """That event loop is closed."""
        with self._lock:
            self._loop = None
            open_calls = self._open
            self._open = {}
            self._tasks = {}

        for future, work in open_calls.items():
            with suppress(RuntimeError):  # its task has swallowed its cancellation
                work.close()
            future.set_exception(self._ended())

    def close(self) -> None:
        """On that event loop: no further work begins, and work under way is cancelled."""
        with self._lock:
            self.is_closed = True
        for task in list(self._tasks.values()):
            task.cancel()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on that event loop and returns its result. A cancellation is passed
        on."""
        caller_loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def wake_caller(_: object) -> None:
            with suppress(RuntimeError):  # the caller has ended with its loop
                caller_loop.call_soon_threadsafe(answered.set)

        future = self._ask(work)
        future.add_done_callback(wake_caller)
        try:
            await answered.wait()
        except asyncio.CancelledError:
            self.soon(lambda: self._cancel(future))
            raise

        return future.result()

    def call_now(self, work: Callable[[], T], within_s: float) -> T:
        """Calls a function that does not wait, from a thread that may block for it. Raises
        EngineUnavailableError after `within_s`."""

        async def done() -> T:
            return work()

        try:
            return self._ask(done()).result(within_s)
        except TimeoutError as error:
            raise EngineUnavailableError(f"the run did not answer within {within_s:g} s") from error

    def soon(self, work: Callable[[], object]) -> None:
        """Calls a function on that event loop, if it still exists."""
        with self._lock, suppress(RuntimeError):  # the loop has just been closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work)

    def _ask(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            is_open = self._loop is not None and not self.is_closed
            if is_open:
                self._open[future] = work

        if not is_open:
            work.close()
            raise self._ended()

        self.soon(lambda: self._start(future))
        return future

    # What follows happens on that event loop.

    def _start(self, future: Future[Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._open[future])
        self._tasks[future] = task
        if self.is_closed:
            task.cancel()
        task.add_done_callback(lambda task: self._done(future, task))

    def _cancel(self, future: Future[Any]) -> None:
        if future in self._tasks:
            self._tasks[future].cancel()

    def _done(self, future: Future[Any], task: asyncio.Task[Any]) -> None:
        self._open.pop(future, None)
        self._tasks.pop(future, None)
        error = self._ended() if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)
