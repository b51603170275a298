"""SIGTERM to any of several processes stops the first one."""

from __future__ import annotations

import os
import signal
import threading
import time

from torch import distributed

from agentevo.runs.orchestration.ranks import Stops, catch_sigterm

WITHIN_S = 300


def heard(store: distributed.Store, stop_signals: list[int], *, tell: int | None) -> list[str]:
    """What the first process notes, once a process has been asked to stop."""
    notes: list[str] = []
    with Stops(store, 0).watch(stop_signals, notes.append):
        if tell is not None:
            Stops(store, tell).announce()
            deadline = time.monotonic() + WITHIN_S
            while not stop_signals and time.monotonic() < deadline:
                time.sleep(0.01)

    return notes


def test_the_first_process_hears_that_another_was_asked():
    received: list[int] = []
    notes = heard(distributed.HashStore(), received, tell=3)
    assert received == [signal.SIGTERM]
    assert notes[0].startswith("process 3 was asked to stop (SIGTERM)")


def test_who_has_been_asked_is_not_asked_again():
    received: list[int] = [signal.SIGINT]
    assert not heard(distributed.HashStore(), received, tell=1)
    assert received == [signal.SIGINT]


def test_nobody_is_asked_where_nobody_was():
    received: list[int] = []
    assert not heard(distributed.HashStore(), received, tell=None)
    assert not received


def test_sigterm_is_told_while_the_main_thread_waits_and_if_it_came_before():
    before = signal.getsignal(signal.SIGTERM)
    for is_early in (True, False):
        told = threading.Event()
        with catch_sigterm() as when_sigterm:
            if is_early:
                os.kill(os.getpid(), signal.SIGTERM)
            when_sigterm(told.set)
            if not is_early:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            assert told.wait(WITHIN_S)

        assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_is_not_told_and_does_nothing():
    told = threading.Event()
    with catch_sigterm() as when_sigterm:
        os.kill(os.getpid(), signal.SIGINT)
        when_sigterm(told.set)
    assert not told.is_set()
