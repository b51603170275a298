"""Several engines behind sockets as one: who is asked, and what happens when they refuse, hang,
leave or come. The engines say which of them answered; those of `tests/runs/processes/test_serve.py`
are real processes."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from fake_engines import Engines, SleepyEngine, ask, some, until

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    RequestTooLongError,
)
from agentevo.inference.serving import remote
from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine


def test_conversations_stay_where_their_cache_is_and_new_ones_go_where_there_is_least_to_do(
    tmp_path,
):
    async def work():
        async with some(tmp_path, 1, 2, 3) as (_engines, client):
            homes = await asyncio.gather(*(ask(client, f"s{i}") for i in range(6)))
            assert sorted(homes) == [1, 1, 2, 2, 3, 3]
            for _ in range(3):
                assert await asyncio.gather(*(ask(client, f"s{i}") for i in range(6))) == homes
            assert [await ask(client, f"s{i}") for i in range(6)] == homes

    asyncio.run(work())


@pytest.mark.slow
def test_the_load_that_others_make_counts(tmp_path):
    async def work():
        async with some(tmp_path, 1, 2) as (engines, client):
            other = RemoteEngine(engines.directory, poll_s=0.02)
            await other.refresh()
            one, two = sorted(await asyncio.gather(*(ask(client, f"x{i}") for i in range(2))))
            assert (one, two) == (1, 2)

            homes = {await ask(other, name): name for name in ("p", "q", "r")}
            busy = next(iter(homes))
            for engine in engines.by_name.values():
                engine.says = [60.0, 60.0, 60.0] if engine.number == busy else []

            waiting = [asyncio.create_task(ask(other, homes[busy])) for _ in range(3)]
            await until(lambda: sum(one.running for one in engines.by_name.values()) == 3)
            await client.refresh()
            assert {await ask(client) for _ in range(4)} == {1, 2} - {busy}

            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await other.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "error",
    [RequestTooLongError("1030 tokens are too many"), DeadlineExceededError("too late")],
    ids=repr,
)
def test_what_no_other_engine_can_do_better_is_raised_as_it_was(error, tmp_path):
    async def work():
        async with some(tmp_path, 1, 2) as (engines, client):
            for engine in engines.by_name.values():
                engine.says = [error]
            with pytest.raises(type(error), match=str(error)) as raised:
                await ask(client)
            assert type(raised.value) is type(error)
            assert sum(len(engine.asked) for engine in engines.by_name.values()) == 1

    asyncio.run(work())


def test_who_refuses_is_passed_over_and_when_all_do_it_is_said(tmp_path):
    async def work():
        async with some(tmp_path, 1, 2) as (engines, client):
            home = await ask(client, "a")
            engines.by_name[f"e{home}"].says = [
                EngineError("the engine's step failed: out of memory")
            ]
            assert await ask(client, "a") == 3 - home
            assert await ask(client, "a") == 3 - home, "it lives there now"

            for engine in engines.by_name.values():
                engine.says = [EngineError("the engine's step failed: out of memory")]

            with pytest.raises(EngineError, match="out of memory") as raised:
                await ask(client)

            assert type(raised.value) is EngineError

    asyncio.run(work())


def test_who_hangs_up_is_cancelled_in_the_engine(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engine = engines.by_name["e1"]
            engine.says = [60.0, 60.0]
            task = asyncio.create_task(ask(client))
            await until(lambda: engine.running == 1)

            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            await until(lambda: engine.cancelled == 1)
            with pytest.raises(DeadlineExceededError, match=r"no completion within 0\.\d+ s"):
                await ask(client, deadline_s=0.3)

            await until(lambda: engine.cancelled == 2)
            assert await ask(client) == 1

    asyncio.run(work())


def test_an_engine_that_leaves_hands_its_requests_on(tmp_path):
    """They are answered by another one at once, and its conversations go on there; a lower version
    of it holds nobody back any more."""

    async def work():
        async with some(tmp_path, 1) as (engines, client):
            other = await engines.start(2)
            await client.refresh()

            engines.by_name["e1"].says = [60.0]
            engines.by_name["e2"].says = [60.0]
            tasks = [asyncio.create_task(ask(client, f"s{i}")) for i in range(2)]
            await until(lambda: all(engine.running == 1 for engine in engines.by_name.values()))
            other.version = 5
            await client.refresh()

            assert client.version == 3
            assert [await ask(client) for _ in range(4)] == [2] * 4, "the newest version"

            before = client.stats()
            await engines.leave["e1"].aclose()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=300)
            assert [task.result() for task in done] == [2]

            await client.refresh()
            assert client.version == 5

            stats = client.stats()
            assert (before["engine/engines"], stats["engine/engines"]) == (2, 1)
            assert stats["engine/generated_tokens"] >= before["engine/generated_tokens"] >= 30, (
                "what it has counted stays counted"
            )
            assert stats["engine/running"] == 1

    asyncio.run(work())


def test_who_sleeps_is_asked_only_when_all_do(tmp_path):
    async def work():
        async with AsyncExitStack() as stack:
            engines = Engines(tmp_path, stack)
            one, two = [await engines.start(number, kind=SleepyEngine) for number in (1, 2)]
            client = RemoteEngine(EngineDirectory(tmp_path), poll_s=0.02)
            stack.push_async_callback(client.close)
            await client.refresh()

            names = [f"s{i}" for i in range(4)]
            homes = [await ask(client, name) for name in names]
            assert sorted(homes) == [1, 1, 2, 2]

            one.asleep = True
            one.version = 5
            two.version = 4
            await client.refresh()
            assert [await ask(client, name) for name in (*names, None, None)] == [2] * 6

            two.asleep = True
            await client.refresh()
            assert [await ask(client, name) for name in names] == [2] * 4, (
                "where their caches are by now"
            )

            one.asleep = False
            await client.refresh()
            assert [await ask(client, name) for name in names] == [1] * 4

    asyncio.run(work())


@pytest.mark.slow
def test_an_engine_that_stays_at_old_weights_holds_nobody_up(tmp_path, monkeypatch, caplog):
    """Whatever keeps it from reading them. It is back with new ones, or when nobody has any."""
    monkeypatch.setattr(remote, "LATE_S", 1.0)

    async def work():
        async with some(tmp_path, 1, 2) as (engines, client):
            late = engines.by_name["e1"]
            other = engines.by_name["e2"]
            homes = {await ask(client, name): name for name in ("a", "b")}

            for version in range(4, 10):
                late.version = version - 1
                other.version = version
                await client.refresh()
                assert client.version == version - 1, "it is behind all the time, and goes on"
                await asyncio.sleep(0.2)

            assert await ask(client, homes[1]) == 1, "its conversations stay for the time being"

            await until(lambda: client.version == 9)
            assert [await ask(client, name) for name in (homes[1], None, None)] == [2] * 3

            late.version = 9
            await client.refresh()
            assert client.version == 9 and await ask(client, "c") == 1

            other.version = 10
            await client.refresh()
            assert client.version == 9

            await until(lambda: client.version == 10)
            await engines.leave["e2"].aclose()
            await client.refresh()
            assert client.version == 9 and await ask(client, "c") == 1

    asyncio.run(work())
    told = [
        record.message
        for record in caplog.records
        if "while others have newer weights" in record.message
    ]
    assert ["version 8" in told[0], "version 9" in told[1], len(told)] == [True, True, 2]


def test_without_engines_a_request_waits_for_one_until_its_deadline(tmp_path):
    async def work():
        async with some(tmp_path / "engines") as (engines, client):
            started = time.monotonic()
            with pytest.raises(
                EngineUnavailableError,
                match=rf"within 0\.3 s \(0 known; no engine was found\): .*{tmp_path}/engines",
            ):
                await ask(client, deadline_s=0.3)

            assert time.monotonic() - started > 0.29
            assert client.version == -1

            waiting = asyncio.create_task(ask(client, "a"))
            await asyncio.sleep(0.1)
            await engines.start(4, version=0)

            assert await waiting == 4
            assert client.version == 0

    asyncio.run(work())


def test_an_engine_that_was_killed_is_replaced_by_one_that_comes_later(tmp_path):
    """Its announcement is still there, and nobody listens."""

    async def work():
        async with some(tmp_path, 1) as (engines, client):
            assert await ask(client, "a") == 1

            dead = Announcement(url="http://127.0.0.1:9", name="dead", pid=9, started_at=1.0)
            engines.directory.announce(dead)
            await engines.leave["e1"].aclose()
            waiting = asyncio.create_task(ask(client, "a"))
            await asyncio.sleep(0.2)
            assert not waiting.done() and client.version == -1

            await engines.start(2)
            assert await waiting == 2

    asyncio.run(work())


def test_a_new_version_is_known_when_its_first_tokens_are(tmp_path):
    """Though the client asks for states once a minute only."""

    async def work():
        async with AsyncExitStack() as stack:
            engine = await Engines(tmp_path, stack).start(1)
            client = RemoteEngine(EngineDirectory(tmp_path), poll_s=60.0)
            stack.push_async_callback(client.close)
            await client.refresh()
            assert client.version == 3

            engine.version = 4
            assert await ask(client) == 1
            assert client.version == 4

            engine.version = 5
            await until(lambda: client.version == 5)
            before = client.stats()["engine/generated_tokens"]
            await asyncio.sleep(0.2)
            assert client.stats()["engine/generated_tokens"] == before

            await client.refresh()
            assert client.stats()["engine/generated_tokens"] == 11

    asyncio.run(work())


@pytest.mark.parametrize(
    "error", [OSError("the folder is away"), asyncio.CancelledError()], ids=repr
)
def test_a_look_that_fails_ends_no_request_and_no_looking(error, tmp_path, monkeypatch):
    """Also one that something has cancelled from within."""
    real = EngineDirectory.living
    failures = [error, error]

    def living(self, max_age_s):
        if failures:
            raise failures.pop()
        return real(self, max_age_s)

    async def work():
        async with AsyncExitStack() as stack:
            await Engines(tmp_path, stack).start(1)
            client = RemoteEngine(EngineDirectory(tmp_path), poll_s=0.02)
            stack.push_async_callback(client.close)
            monkeypatch.setattr(EngineDirectory, "living", living)
            assert await ask(client) == 1
            assert failures == []

    asyncio.run(work())


class Clock:
    """The module `time` of a process that can be made to stand still."""

    def __init__(self) -> None:
        self.stood_still_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.stood_still_s


def test_a_client_that_stood_still_itself_takes_nobody_for_dead(tmp_path, monkeypatch):
    """For longer than an engine may be silent, while it waits for its next look or is in one. No
    time passes for anybody else, so that a busy machine changes nothing."""

    async def work():
        async with some(tmp_path, 1, max_age_s=60.0) as (engines, client):
            clock = Clock()
            for one in client._known.values():
                one.last_report_at = clock.monotonic()

            monkeypatch.setattr(remote, "time", clock)
            living = client._engines.living
            looks = []

            def slow(max_age_s: float):
                looks.append(len(looks))
                clock.stood_still_s += 100.0 if len(looks) == 2 else 0.0
                return living(max_age_s)

            monkeypatch.setattr(client._engines, "living", slow)
            engines.by_name["e1"].says = [0.1]
            task = asyncio.create_task(ask(client, deadline_s=1e6))
            await until(lambda: engines.by_name["e1"].running == 1)

            (known,) = client._known.values()
            await until(lambda: len(looks) > 3)
            clock.stood_still_s += 100.0
            assert await task == 1

            number = len(looks)
            await until(lambda: len(looks) > number + 2)
            assert list(client._known.values()) == [known] and known.connected
            assert len(engines.by_name["e1"].asked) == 1

    asyncio.run(work())


def test_a_closed_client_says_so(tmp_path):
    async def work():
        async with some(tmp_path, 1) as (engines, client):
            engines.by_name["e1"].says = [60.0]
            task = asyncio.create_task(ask(client))
            await until(lambda: engines.by_name["e1"].running == 1)

            await client.close()
            for waiting in (task, ask(client)):
                with pytest.raises(EngineUnavailableError, match="is closed"):
                    await waiting

            await until(lambda: engines.by_name["e1"].cancelled == 1)

    asyncio.run(work())
