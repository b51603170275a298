"""Runs a coroutine to its end, together with user code that can do anything to the event loop.

A user's code (an agent, a scorer) runs in a `TaskScope`. It can cancel only the tasks that were
started in its scope. A KeyboardInterrupt or SystemExit of such a task ends only that task.
`loop.stop()` stops nothing. A task that swallows its cancellation is left behind at the end,
CLOSE_TIMEOUT_S seconds after all tasks were cancelled. Connections that clients have left open are
closed at the end. The threads of asyncio.to_thread are for user code. AgentEvo's own work uses
separate threads (`in_thread`), so a user's call that hangs does not block it. These guarantees hold
only on the loops of `run_coroutine`.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from agentevo.runtime.console import to_stderr
from agentevo.runtime.signals import Interrupt

T = TypeVar("T")
P = ParamSpec("P")

CLOSE_TIMEOUT_S = 5.0
"""The time in seconds that the end of a loop waits for cancelled tasks, and then for the loop's
threads."""

MAX_THREADS = 512
"""The maximum number of concurrent calls of asyncio.to_thread. If that many hang, further calls
wait."""

_scope: contextvars.ContextVar[TaskScope | None] = contextvars.ContextVar(
    "agentevo task scope", default=None
)
_scoped_tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
_own_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()


class TaskScope:
    """The tasks that a piece of a user's code starts."""

    def __init__(self) -> None:
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task in this scope. Tasks that it starts are in the scope too."""
        context = contextvars.copy_context()
        context.run(_scope.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        _scoped_tasks.add(task)

    def cancel(self) -> None:
        """Cancels every task of the scope that still runs."""
        for task in list(self._tasks):
            task.cancel()


@contextmanager
def outside_scopes() -> Iterator[None]:
    """For AgentEvo's code that user code calls: tasks that start in this block belong to no
    scope."""
    token = _scope.set(None)
    try:
        yield
    finally:
        _scope.reset(token)


class _LoopTask(asyncio.Task[Any]):
    """A task that code of another scope can't cancel."""

    def __init__(self, work: Any, *, context: contextvars.Context | None = None, **options: Any):
        self._scope = (contextvars.copy_context() if context is None else context).get(_scope)
        super().__init__(work, context=context, **options)
        if self._scope is not None:
            self._scope.add(self)

    def cancel(self, msg: Any = None) -> bool:
        asking = _scope.get()
        if asking is not None and asking is not self._scope:
            return False
        return super().cancel(msg)


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run with the guarantees of the module. In a notebook, where an event loop already
    runs, the coroutine runs on a separate thread."""
    if not _is_running():
        return _run(work)

    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(_run(work))
        except BaseException as error:  # noqa: BLE001 (handed to the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()

    if errors:
        raise errors[0]

    return results[0]


async def gather_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all works, in order. The first failure cancels the others."""
    running = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class NoticesBlocks:
    """Awaits a user's coroutine, and warns once if it blocks the event loop. Code that blocks, such
    as time.sleep or a client that is not async, stops everything else on the loop. Steps of at
    least BLOCK_S seconds count. The warning appears when they add up to TELL_S seconds."""

    BLOCK_S = 0.25
    TELL_S = 1.0

    def __init__(self, what: str, remedy: str) -> None:
        """`what` is the beginning of the warning, and `remedy` its end."""
        self._what = what
        self._remedy = remedy
        self._blocked_s = 0.0
        self._has_warned = False

    @types.coroutine
    def run(self, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Returns the result of the work."""
        steps: Any = work.__await__()
        go_on: Callable[[], Any] = partial(next, steps)
        while True:
            started_at = time.perf_counter()
            try:
                waited_for = go_on()
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                self._add(time.perf_counter() - started_at)

            try:
                sent = yield waited_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 (passed to the work)
                go_on = partial(steps.throw, error)
            else:
                go_on = partial(next, steps) if sent is None else partial(steps.send, sent)

    def _add(self, step_s: float) -> None:
        self._blocked_s += step_s if step_s >= self.BLOCK_S else 0.0
        if self._blocked_s >= self.TELL_S and not self._has_warned:
            self._has_warned = True
            to_stderr(
                f"{self._what} has blocked the event loop for {self._blocked_s:.1f} s, in which "
                f"nothing else ran: {self._remedy}"
            )


async def in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """asyncio.to_thread, on a thread that a user's code can't occupy."""
    loop = asyncio.get_running_loop()
    call = partial(contextvars.copy_context().run, function, *args, **options)
    return await loop.run_in_executor(_own_threads.get(loop), call)


async def run_to_end(work: Awaitable[T]) -> T:
    """Waits for the work even if this task is cancelled, also repeatedly, and raises the
    cancellation afterwards."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error

    if cancellation is not None:
        raise cancellation
    return task.result()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.new_event_loop()
    threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="to_thread")
    own_threads = ThreadPoolExecutor(thread_name_prefix="agentevo")
    loop.set_default_executor(threads)
    _own_threads[loop] = own_threads
    loop.set_task_factory(lambda loop, work, **options: _LoopTask(work, loop=loop, **options))
    asyncio.set_event_loop(loop)
    try:
        main = loop.create_task(work)
        with _ctrl_c(loop, main) as received:
            _drive(loop, main)
        if received and main.cancelled():
            raise KeyboardInterrupt
        return main.result()
    finally:
        try:
            _end_tasks(loop)
            _end_threads(threads)
            _end_threads(own_threads)
            _end_connections(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _drive(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    """Runs the loop until `main` has ended, even if a user's task tries to stop it."""
    main.add_done_callback(lambda _: loop.stop())
    while not main.done():
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, Interrupt) or not _is_of_a_scope(error):
                raise


def _is_of_a_scope(error: BaseException) -> bool:
    """Whether a user's task has ended with exactly this exception."""
    return any(
        task.done() and not task.cancelled() and task.exception() is error
        for task in list(_scoped_tasks)
    )


@contextmanager
def _ctrl_c(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[list[int]]:
    """If no other handler is installed, Ctrl-C cancels `main`, and a second Ctrl-C interrupts at
    once. Yields the received signals."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1 or main.done():
            raise Interrupt
        contextvars.Context().run(main.cancel)  # user code may be running now
        loop.call_soon_threadsafe(lambda: None)

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, handle)

    try:
        yield received
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the tasks that still run, and waits for them, at most CLOSE_TIMEOUT_S seconds."""
    unfinished = asyncio.all_tasks(loop)
    for task in unfinished:
        task.cancel()

    if unfinished:
        _drive(loop, loop.create_task(asyncio.wait(unfinished, timeout=CLOSE_TIMEOUT_S)))

    for task in unfinished:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {
                    "message": "a task failed while it was being cancelled",
                    "exception": error,
                    "task": task,
                }
            )

    loop.set_exception_handler(lambda loop, context: None)  # no code waits for the remaining ones
    _drive(loop, loop.create_task(_within(CLOSE_TIMEOUT_S, loop.shutdown_asyncgens)))


async def _within(seconds: float, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work()


def _end_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Closes the connections that clients have left open. A pool that outlives the loop, such as
    that of a client in a module, then opens new connections on the next loop. An open connection
    would fail there with "Event loop is closed" when it is used or garbage collected."""
    transports = list(getattr(loop, "_transports", {}).values())
    for transport in transports:
        with suppress(AttributeError):  # a transport that closed after its last write has no loop
            transport.abort()
    if transports:
        _drive(loop, loop.create_task(asyncio.sleep(0)))  # runs the callbacks of abort


def _end_threads(threads: ThreadPoolExecutor) -> None:
    """Waits at most CLOSE_TIMEOUT_S seconds for calls of asyncio.to_thread. A call that hangs can't
    be ended."""
    ending = threading.Thread(target=threads.shutdown, daemon=True)
    ending.start()
    ending.join(CLOSE_TIMEOUT_S)
