from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

from agentevo.errors import DeadlineExceededError, StoreError, StoreUnavailableError
from agentevo.runtime import retry as patience
from agentevo.runtime.retry import with_retries


def calls(*results):
    left = list(results)
    made = []

    async def call():
        made.append(1)
        result = left.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    return call, made


def test_again_while_the_database_is_away(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    call, made = calls(
        StoreUnavailableError("refused"),
        DeadlineExceededError("late"),
        StoreUnavailableError("refused"),
        7,
    )
    assert asyncio.run(with_retries(call, within_s=300, what="x")) == 7
    assert len(made) == 4


def test_a_refusal_is_raised_at_once():
    call, made = calls(StoreError("moved on"), 7)
    with pytest.raises(StoreError, match="moved on"):
        asyncio.run(with_retries(call, within_s=300, what="x"))
    assert len(made) == 1


def test_patience_ends(monkeypatch):
    now = [1000.0]

    async def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(
        monotonic=lambda: now[0], time=time.time, localtime=time.localtime, strftime=time.strftime
    )
    loop = SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "asyncio", loop)
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    call, made = calls(*[DeadlineExceededError("late")] * 99)
    with pytest.raises(StoreUnavailableError, match=r"leasing: stopped trying after 0.1 s: late"):
        asyncio.run(with_retries(call, within_s=0.1, what="leasing"))

    assert len(made) == 4, "after 0, 10, 30 and 70 ms: the pauses double"


def test_waiting_is_told_at_once_and_then_every_so_often(monkeypatch):
    monkeypatch.setattr(patience, "REPORT_INTERVAL_S", 0.2)
    told = []

    async def call():
        if len(told) < 3:
            raise StoreUnavailableError(f"refused {len(told)}")
        return 7

    async def work():
        asyncio.get_running_loop().call_later(0.04, lambda: told.append("40 ms"))
        return await with_retries(call, within_s=300, what="opening", notify=told.append)

    assert asyncio.run(work()) == 7

    until = r"opening: waiting until \d\d:\d\d:\d\d: refused"
    assert re.fullmatch(rf"{until} 0", told[0]), "the first failure, at once"
    assert (
        told[1] == "40 ms"
        and re.fullmatch(rf"{until} [12]", told[2])
        and re.fullmatch(r"opening: done after \d s", told[3])
    )
    assert len(told) == 4


def test_a_call_that_hangs_is_told_and_a_quick_one_is_not(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_S", 0.1)
    told = []

    async def slow():
        await asyncio.sleep(0.2)

    async def work():
        await with_retries(slow, within_s=300, what="opening", notify=told.append)
        assert len(told) == 2 and told[0].endswith(": no answer yet") and "done after" in told[1]
        call, _ = calls(7)
        await with_retries(call, within_s=300, what="opening", notify=told.append)
        await asyncio.sleep(0.2)
        assert len(told) == 2

    asyncio.run(work())


def test_of_calls_of_one_name_that_wait_together_one_is_reported(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_S", 0.0)
    monkeypatch.setattr(patience, "REPORT_INTERVAL_S", 0.001)
    lines: list[str] = []

    async def scenario() -> None:
        answered = asyncio.Event()

        async def call() -> None:
            await asyncio.wait_for(answered.wait(), 300)

        waits = [
            asyncio.create_task(with_retries(call, what="put_images", notify=lines.append))
            for _ in range(100)
        ]
        while not lines:
            await asyncio.sleep(0)
        monkeypatch.setattr(patience, "REPORT_INTERVAL_S", 300)
        await asyncio.sleep(0)
        answered.set()
        await asyncio.gather(*waits)

    asyncio.run(scenario())
    begun = [line for line in lines if "waiting until" in line]
    assert len(begun) < 10 and len(lines) == len(begun) + 1
    assert re.fullmatch(r"put_images: done after 0 s", lines[-1])
