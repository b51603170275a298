"""How a service of a run (engine, sampler) is asked to end: by SIGTERM or Ctrl-C, or by the death
of the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOOK_S = 0.05
"""How often to look whether to stop."""


@contextmanager
def asked_to_stop(parent: int | None = None) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to end. A second Ctrl-C interrupts at once. `parent`: the
    process id that should be ours' parent's; once it is not, nobody is there to ask. Signals are
    heard in the main thread only."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and asked:
            raise KeyboardInterrupt
        asked.append(number)

    hears = threading.current_thread() is threading.main_thread()
    before = (
        {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        if hears
        else {}
    )
    try:
        yield lambda: bool(asked) or (parent is not None and os.getppid() != parent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def unless(stop: Callable[[], bool], waited_for: asyncio.Task[Any]) -> bool:
    """Waits for it; False, with it cancelled, if `stop` came first."""
    while not waited_for.done():
        if stop():
            waited_for.cancel()
            await asyncio.gather(waited_for, return_exceptions=True)
            return False
        await asyncio.wait([waited_for], timeout=LOOK_S)
    return True


@contextmanager
def stop_on_interrupt(tell: Callable[[str], None]) -> Iterator[list[bool]]:
    """The first Ctrl-C asks for a clean stop, the second interrupts at once. Only in the main
    thread, which alone gets signals."""
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        tell("stopping after this step; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
