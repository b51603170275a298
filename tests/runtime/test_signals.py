"""How a process is asked to end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from agentevo.runtime.signals import (
    catch_stop_signals,
    collect_signals,
    end_stopped,
    finishes_before_stop,
    stop_on_interrupt,
)


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def send(number):
    os.kill(os.getpid(), number)


def test_signals_are_collected_and_what_they_did_before_comes_back():
    before = handlers()
    calls = []
    with collect_signals(signal.SIGINT, signal.SIGTERM, on_first=calls.append) as received:
        assert received == []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            send(number)
        assert received == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]

    assert calls == [signal.SIGTERM]
    assert handlers() == before


def test_a_service_is_asked_by_signals_or_by_the_death_of_its_parent(monkeypatch):
    before = handlers()
    for number in (signal.SIGTERM, signal.SIGINT):
        with catch_stop_signals() as stop:
            assert not stop()
            send(number)
            assert stop()

    with catch_stop_signals() as stop:
        send(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)

    assert handlers() == before
    with catch_stop_signals(parent=os.getppid()) as stop:
        assert not stop()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop()


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            signal.SIGINT,
            "stopping after this step or within this evaluation; Ctrl-C again stops at once",
        ),
        (
            signal.SIGTERM,
            "the process was asked to stop (SIGTERM): stopping after this step or within this "
            "evaluation; Ctrl-C stops at once",
        ),
    ],
)
def test_a_command_says_why_it_stops_and_is_interrupted_by_ctrl_c_after_that(first, said):
    told = []
    with stop_on_interrupt(told.append) as received:
        assert not received
        end_stopped(received)
        send(first)
        assert received == [first]
        assert told == [said]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)

    assert len(told) == 1
    with pytest.raises(SystemExit if first == signal.SIGTERM else KeyboardInterrupt) as ended:
        end_stopped(received)

    assert first == signal.SIGINT or ended.value.code == 143


def test_other_threads_hear_nothing_and_work():
    entered = []

    def use():
        with catch_stop_signals() as stop, collect_signals(signal.SIGINT) as received:
            entered.append((stop(), list(received)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert entered == [(False, [])]


def test_work_is_waited_for_unless_it_is_to_stop():
    async def scenario():
        quick = asyncio.create_task(asyncio.sleep(0, "done"))
        assert await finishes_before_stop(quick, lambda: False)
        assert quick.result() == "done"
        endless = asyncio.create_task(asyncio.Event().wait())
        assert not await finishes_before_stop(endless, lambda: True)
        assert endless.cancelled()

    asyncio.run(scenario())
