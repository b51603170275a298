"""The bridge between the gateway's event loop and the sampler's, which run in two threads.

Calls that one side sends while the other is busy arrive as one batch: the other loop is woken once.
They arrive in the order in which they were sent, so all pieces of an answer arrive before its end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from agentevo.agents.gateway.refusals import refusal_of

T = TypeVar("T")


class Mailbox:
    """Calls for one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def send(self, function: Callable[..., None], *arguments: Any) -> None:
        """Raises RuntimeError if the loop has ended."""
        self._calls.append((function, arguments))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        # First the mark, then the calls: a call that is sent during them wakes the loop again.
        self._is_woken = False
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001 (as the loop does with its own calls)
                self._loop.call_exception_handler({"message": "a call failed", "exception": error})


class Bridge:
    """See the module. Made on the sampler's loop."""

    def __init__(self, gateway: asyncio.AbstractEventLoop) -> None:
        self._gateway = gateway
        self._sampler = asyncio.get_running_loop()
        self._to_gateway = Mailbox(gateway)
        self._to_sampler = Mailbox(self._sampler)

    @property
    def sampler(self) -> asyncio.AbstractEventLoop:
        return self._sampler

    def send(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the sampler's loop; from the gateway's. Raises RuntimeError if
        that loop has ended."""
        self._to_sampler.send(function, *arguments)

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the gateway's loop; from the sampler's."""
        self._to_gateway.send(function, *arguments)

    def submit(
        self, work: Coroutine[Any, Any, T], context: contextvars.Context
    ) -> asyncio.Future[T]:
        """Runs something on the sampler's loop in a context; from the gateway's. Cancelling the
        future cancels it; a work that the sampler cancels fails with a Refusal. Raises RuntimeError
        if the sampler's loop has ended."""
        crossing = _Crossing(self._gateway.create_future(), self)
        try:
            self.send(crossing.begin, work, context)
        except RuntimeError:
            work.close()
            raise

        crossing.answer.add_done_callback(crossing.give_up)
        return crossing.answer


class _Crossing:
    """One piece of work on its way."""

    def __init__(self, answer: asyncio.Future[Any], bridge: Bridge) -> None:
        self.answer = answer
        self._bridge = bridge
        self._task: asyncio.Task[None] | None = None
        self._is_answered = False

    def begin(self, work: Coroutine[Any, Any, Any], context: contextvars.Context) -> None:
        if self.answer.cancelled():
            work.close()
            return
        self._task = self._bridge.sampler.create_task(self._run(work), context=context)
        self._task.add_done_callback(lambda task: self._pass_result_on(task, work))

    async def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (the gateway's to tell)
            self._answer(self._fail, error)
        else:
            # At once, and not when the task is done, which an engine's next step may come before.
            self._answer(self._succeed, result)

    def _pass_result_on(self, task: asyncio.Task[None], work: Coroutine[Any, Any, Any]) -> None:
        if not self._is_answered:  # cancelled before it began, or ended with the process
            work.close()
            error = None if task.cancelled() else task.exception()
            self._answer(self._fail, error or asyncio.CancelledError())

    def _answer(self, settle: Callable[[Any], None], outcome: Any) -> None:
        self._is_answered = True
        with suppress(RuntimeError):  # the gateway has ended
            self._bridge.tell(settle, outcome)

    def give_up(self, answer: asyncio.Future[Any]) -> None:
        """The waiting side has cancelled the work."""
        if answer.cancelled():
            with suppress(RuntimeError):  # that loop has ended, and its tasks with it
                self._bridge.send(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _succeed(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.answer.done():
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self.answer.set_exception(refusal_of(error) if is_cancelled else error)
