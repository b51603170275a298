"""Recording calls: parents, outcomes, bounds, and stores that are slow, away or left behind."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from agentevo.errors import StoreError, StoreUnavailableError
from agentevo.store import call_log, open_store
from agentevo.store.call_log import AttemptCalls, CallLog, record_call
from agentevo.types import Call


class MemoryStore:
    """What a log needs of a store. `fails` is raised by each write until it is None."""

    def __init__(self) -> None:
        self.written: dict[str, Call] = {}
        self.num_writes = 0
        self.fails: Exception | None = None
        self.takes_s = 0.0

    async def write_calls(self, calls: Iterable[Call]) -> None:
        await asyncio.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        for call in calls:
            self.written[call.id] = call
            self.num_writes += 1

    async def renew_calls(self, recorder: str) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make_log(store: MemoryStore) -> Callable[..., CallLog]:
    async def give() -> Any:
        return store

    return lambda **options: CallLog(give, **options)


def test_a_call_knows_what_it_is_inside_of(
    store: MemoryStore, make_log: Callable[..., CallLog]
) -> None:
    async def scenario() -> None:
        async with make_log() as log:
            calls = AttemptCalls(log, "t")
            other = AttemptCalls(log, "u")
            with calls.attempt("Player"):
                async with calls.call("tool", "plan", depth=2) as plan:
                    with record_call("policy", "generate") as asked:
                        asked.note(turn=0)
                    with other.attempt("Judge"), record_call("policy", "other"):
                        pass
                    plan.note(done=True)

                async def search(name: str) -> None:
                    with calls.call("tool", name):
                        await asyncio.sleep(0.01)
                        with record_call("policy", f"in {name}"):
                            pass

                await asyncio.gather(search("a"), search("b"))

            with calls.call("scorer", "exact"):  # when it is over
                pass
            with record_call("policy", "outside"):
                pass

    asyncio.run(scenario())
    by_id = store.written
    inside = {one.name: one.parent and by_id[one.parent].name for one in by_id.values()}
    assert inside == {
        "Player": None,
        "plan": "Player",
        "generate": "plan",
        "Judge": None,
        "other": "Judge",
        "a": "Player",
        "b": "Player",
        "in a": "a",
        "in b": "b",
        "exact": "Player",
    }

    found = {one.name: one for one in by_id.values()}
    assert found["plan"].attributes == {"depth": 2, "done": True}
    assert found["generate"].attributes == {"turn": 0}
    assert found["other"].trajectory_id == "u"

    for one in by_id.values():
        assert one.status == "completed" and one.error is None
        assert one.ended_at is not None and one.ended_at >= one.started_at


def test_how_a_call_ended(store: MemoryStore, make_log: Callable[..., CallLog]) -> None:
    async def scenario() -> None:
        async with make_log() as log:
            calls = AttemptCalls(log, "t")
            with calls.attempt("Player") as attempt:
                with pytest.raises(ValueError, match="no"), calls.call("tool", "raises"):
                    raise ValueError("no\ud800" + "o" * 1000)

                async def forever() -> None:
                    async with calls.call("tool", "cancelled"):
                        await asyncio.sleep(60)

                hung = asyncio.create_task(forever())
                await asyncio.sleep(0)
                hung.cancel()
                await asyncio.gather(hung, return_exceptions=True)
                left = calls.call("tool", "left", share=float("nan"), big=2**70, text="é" * 999)
                left.__enter__()
                attempt.outcome("failed", "out of time")

            left.__exit__(None, None, None)

    asyncio.run(scenario())
    found = {one.name: one for one in store.written.values()}
    ends = {name: (one.status, one.error) for name, one in found.items()}
    assert ends["Player"] == ("failed", "out of time")
    assert ends["cancelled"] == ("cancelled", None)
    assert ends["left"] == ("cancelled", "its attempt ended")

    status, error = ends["raises"]
    assert status == "failed" and error is not None and error.startswith("ValueError: no?o")
    assert len(error) == call_log.MAX_TEXT

    small = found["left"].attributes
    assert (small["share"], small["big"]) == ("nan", str(2**70)) and len(str(small["text"])) < 999


@pytest.mark.slow
def test_a_call_is_seen_within_a_second(sqlite_url: str) -> None:
    """By another process as well: through the store's file."""

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store, call_log.call_log(sqlite_url) as log:

            async def seen(state: Any) -> list[str]:
                async with asyncio.timeout(300):
                    while not (found := [call async for call in store.calls(state=state)]):
                        await asyncio.sleep(0.02)
                return [one.call.name for one in found]

            with AttemptCalls(log, "t").attempt("Player"):
                assert await seen("running") == ["Player"]

            assert await seen("ended") == ["Player"]

    assert call_log.FLUSH_S <= 0.5
    asyncio.run(scenario())


def test_a_store_that_is_away_costs_calls_and_nothing_else(
    store: MemoryStore, make_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "MAX_HELD", 10)
    monkeypatch.setattr(call_log, "FLUSH_S", 0.02)
    monkeypatch.setattr(call_log, "MAX_PAUSE_S", 0.05)
    told: list[str] = []

    async def scenario() -> None:
        async with make_log(notify=told.append) as log:
            calls = AttemptCalls(log, "t")
            store.fails = StoreUnavailableError("gone")
            with calls.attempt("Player"):
                for number in range(25):
                    with calls.call("tool", str(number)):
                        await asyncio.sleep(0.005)
                assert store.written == {} and log.dropped == 16

                store.fails = None
                while len(store.written) < 10:  # those that were held are written after all
                    await asyncio.sleep(0.01)

                with calls.call("tool", "again"):
                    pass

    asyncio.run(scenario())
    names = [one.name for one in store.written.values()]
    assert names == ["Player", *map(str, range(9)), "again"]
    assert next(iter(store.written.values())).attributes == {"calls_dropped": 16}
    assert told == ["16 calls of attempts were not recorded: StoreUnavailableError: gone"]


@pytest.mark.parametrize("error", [StoreError("refused"), RuntimeError("a bug")])
def test_what_the_store_refuses_is_counted(
    store: MemoryStore, make_log: Callable[..., CallLog], error: Exception
) -> None:
    told: list[str] = []

    async def scenario() -> None:
        store.fails = error
        async with make_log(notify=told.append) as log:
            with AttemptCalls(log, "t").attempt("Player"):
                pass

    asyncio.run(scenario())
    assert told == [f"1 calls of attempts were not recorded: {type(error).__name__}: {error}"]


def test_the_end_of_a_run_waits_for_a_slow_store_only_so_long(
    store: MemoryStore, make_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "CLOSE_TIMEOUT_S", 0.1)
    store.takes_s = 3600.0
    told: list[str] = []

    async def scenario() -> None:
        async with make_log(notify=told.append) as log:
            with AttemptCalls(log, "t").attempt("Player"):
                pass

    asyncio.run(asyncio.wait_for(scenario(), 300))

    why = "the run ended before they were written to the store"
    assert told == [f"1 calls of attempts were not recorded: {why}"]


@pytest.mark.soak
def test_a_million_calls_take_bounded_memory(
    store: MemoryStore, make_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fast as they can be made, on a store that never answers: what is held is bounded, all the
    rest is counted."""
    monkeypatch.setattr(call_log, "MAX_HELD", 1000)
    monkeypatch.setattr(call_log, "CLOSE_TIMEOUT_S", 0.2)
    store.takes_s = 36_000.0

    async def scenario() -> None:
        async with make_log() as log:
            calls = AttemptCalls(log, "t")
            for _ in range(10):
                with calls.attempt("Player"):
                    for _ in range(100_000):
                        with calls.call("tool", "t"):
                            pass
                assert len({*log._new, *dict(log._writing)}) <= 1000
                assert log.dropped >= 99_000
                await asyncio.sleep(0)

        assert log.dropped == 1_000_010

    asyncio.run(scenario())


@pytest.mark.slow
def test_recorded_and_dropped_add_up(
    store: MemoryStore, make_log: Callable[..., CallLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the log's thread writes as quickly as it can; nothing is written twice as ended, and
    nothing is held in the end."""
    monkeypatch.setattr(call_log, "FLUSH_S", 0.001)
    monkeypatch.setattr(call_log, "MAX_HELD", 50)

    async def scenario() -> CallLog:
        async with make_log() as log:
            calls = AttemptCalls(log, "t")
            for number in range(20_000):
                with calls.call("tool", "t"):
                    if number % 1000 == 0:
                        await asyncio.sleep(0.002)
        return log

    log = asyncio.run(scenario())
    assert len(store.written) + log.dropped == 20_000
    assert all(one.ended_at is not None for one in store.written.values())
    assert log._num_held == 0


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_calls_without_an_end(
    url: str, clock: Any, start_script: Callable[..., subprocess.Popen[str]]
) -> None:
    program = """
import asyncio, sys
from agentevo.store import call_log
async def main():
    async with call_log.call_log(sys.argv[1]) as log:
        with call_log.AttemptCalls(log, "t").attempt("Player"):
            with call_log.record_call("tool", "over"):
                pass
            with call_log.record_call("tool", "search"):
                print("begun", flush=True)
                await asyncio.sleep(600)
asyncio.run(main())
"""

    async def scenario() -> None:
        async with await open_store(url) as store:
            process = start_script(program, url)
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            for _ in range(3000):
                running = [call.call.name async for call in store.calls(state="running")]
                if running == ["Player", "search"]:
                    break
                await asyncio.sleep(0.1)

            assert running == ["Player", "search"]

            process.kill()
            process.wait()

        clock.steady = 1e12  # long after
        async with await open_store(url, clock=clock) as store:
            states = {call.call.name: call.state async for call in store.calls(trajectory_id="t")}
            assert states == {"Player": "lost", "over": "ended", "search": "lost"}

    asyncio.run(scenario())


def test_without_a_log_nothing_is_recorded() -> None:
    calls = AttemptCalls(None, "t")
    with calls.attempt("Player"), calls.call("tool", "search") as call:
        call.note(results=1)
    assert call.number == 0 and calls.dropped == 0


def test_no_store_is_opened_for_a_run_without_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with call_log.call_log(f"sqlite:///{tmp_path / 'no.sqlite'}"):
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())
