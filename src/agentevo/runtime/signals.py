"""How a process is stopped: by a signal, or by the death of the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

POLL_INTERVAL_S = 0.05
"""The interval in seconds of checks whether to stop."""
STOPPING = "stopping after this step or within this evaluation"
"""What a command does after a stop request."""


class Interrupt(KeyboardInterrupt):
    """A Ctrl-C that the user has pressed. A KeyboardInterrupt of a user's code is only that code's
    failure."""


@contextmanager
def collect_signals(
    *numbers: signal.Signals,
    on_first: Callable[[int], None] = lambda _: None,
    second_interrupts: bool = False,
) -> Iterator[list[int]]:
    """Replaces the usual effect of these signals. Yields a list that grows with each received
    signal. Python handles signals only in the main thread. In other threads the list stays empty.

    `on_first` is called with the first signal. `second_interrupts`: Ctrl-C after another signal
    raises KeyboardInterrupt at once.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received and second_interrupts and number == signal.SIGINT:
            raise Interrupt
        received.append(number)
        if len(received) == 1:
            on_first(number)

    hears = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers} if hears else {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def catch_stop_signals(parent: int | None = None) -> Iterator[Callable[[], bool]]:
    """For a service of a run. Yields a function that returns whether the service must stop. That is
    the case after SIGTERM or Ctrl-C, and when the process with the id `parent` is no longer the
    parent, so that no process could request a stop. A second Ctrl-C interrupts at once."""
    with collect_signals(signal.SIGINT, signal.SIGTERM, second_interrupts=True) as received:
        yield lambda: bool(received) or (parent is not None and os.getppid() != parent)


@contextmanager
def stop_on_interrupt(notify: Callable[[str], None]) -> Iterator[list[int]]:
    """For a command. Yields a list that is empty until the first Ctrl-C or SIGTERM, which requests
    a clean stop. A second Ctrl-C interrupts at once."""

    def on_first(number: int) -> None:
        if number == signal.SIGTERM:  # from a launcher, for example: no key was pressed
            notify(f"the process was asked to stop (SIGTERM): {STOPPING}; Ctrl-C stops at once")
        else:
            notify(f"{STOPPING}; Ctrl-C again stops at once")

    with collect_signals(
        signal.SIGINT, signal.SIGTERM, on_first=on_first, second_interrupts=True
    ) as received:
        yield received


def end_stopped(received: Sequence[int]) -> None:
    """Ends a command that has stopped cleanly after a request: KeyboardInterrupt after Ctrl-C,
    SystemExit with 128 + 15 after SIGTERM. Does nothing if no signal was received."""
    if received and received[0] == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    if received:
        raise KeyboardInterrupt


async def finishes_before_stop(work: asyncio.Task[Any], stop: Callable[[], bool]) -> bool:
    """Waits for `work`. If `stop` becomes true first, cancels the work and returns False."""
    while not work.done():
        if stop():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        await asyncio.wait([work], timeout=POLL_INTERVAL_S)
    return True
