"""A stop that any process of a shared training receives, for example from the scheduler of its
machine. The other processes pass it on through the store that they all share. The first process
then stops cleanly and ends the others.

This holds for SIGTERM only: Ctrl-C reaches all processes of a terminal, and a second Ctrl-C means
something else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from torch import distributed

from agentevo.runtime.signals import STOPPING

_KEY = "rank that was asked to stop"
POLL_INTERVAL_S = 0.5


class Stops:
    """The stops of the processes that train together. This process has number `rank`."""

    def __init__(self, store: distributed.Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def announce(self) -> None:
        """Called on a process other than the first: this process was asked to stop."""
        with suppress(RuntimeError):  # the first process has ended, and all others notice that
            self._store.set(_KEY, str(self._rank))

    @contextmanager
    def watch(self, stop_signals: list[int], note: Callable[[str], None]) -> Iterator[None]:
        """Used on the first process: a stop that another process receives counts as a stop of this
        one."""
        done = threading.Event()

        def listen() -> None:
            while not done.wait(POLL_INTERVAL_S):
                try:
                    if not self._store.check([_KEY]):
                        continue
                    rank = self._store.get(_KEY).decode()
                except RuntimeError:  # the process that had the store has ended
                    return

                if not stop_signals:
                    stop_signals.append(signal.SIGTERM)
                    note(f"process {rank} was asked to stop (SIGTERM): {STOPPING}")

                return

        thread = threading.Thread(target=listen, name="stops", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def catch_sigterm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Makes SIGTERM not end this process, and Ctrl-C do nothing. Yields a function that is called
    once, with the callback for SIGTERM; the callback is also called if SIGTERM has already arrived.
    Python runs a handler only when the main thread returns from what it waits for, so a separate
    thread listens."""
    registered = threading.Event()
    callbacks: list[Callable[[], None]] = []
    arrived, wakes = os.pipe()
    os.set_blocking(wakes, False)

    def listen() -> None:
        while number := os.read(arrived, 1):
            if number[0] == signal.SIGTERM:
                registered.wait()
                if callbacks:
                    callbacks[0]()

    def register(call: Callable[[], None]) -> None:
        callbacks.append(call)
        registered.set()

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    with ExitStack() as stack:
        before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        former = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        thread.start()
        stack.callback(os.close, arrived)
        stack.callback(thread.join)
        stack.callback(registered.set)
        stack.callback(os.close, wakes)
        stack.callback(signal.set_wakeup_fd, former)
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)

        yield register
