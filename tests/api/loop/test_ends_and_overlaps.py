"""Programs that submit at the same time, and runs that end under their hands: who asks is answered,
and what one does ends no run of another."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading

import pytest
from own_loop import TASKS, gathered, loop

import agentevo
from agentevo.api.loop.calls import Calls
from agentevo.errors import AgentEvoError, ConfigError, EngineUnavailableError, TrainingError


def results(trained):
    return sorted((getattr(one, "step", type(one).__name__) for one in trained), key=str)


@pytest.mark.slow
def test_what_two_submissions_share_is_trained_on_once(tmp_path):
    """At the same time: the second is refused, and the run goes on."""

    async def work(model):
        a, b, c, d = await gathered(model, *({"id": name, "query": "?"} for name in "abcd"))
        other = await gathered(model, {"id": "d", "query": "another"})

        async def both(*submissions):
            return results(
                await asyncio.gather(*map(model.train, submissions), return_exceptions=True)
            )

        assert await both([a, b], [b, a]) == [1, "ConfigError"]
        assert await both([c], [c.with_rewards([1.0, 2.0, 3.0, 4.0])]) == [2, "ConfigError"]
        assert await both([d], other) == [3, "ConfigError"]  # the same task, with other content

        (e,) = await gathered(model, {"id": "e", "query": "?"})
        assert await both([e], [e], [e]) == [4, 4, 4]
        with pytest.raises(ConfigError, match="no attempt is trained on twice"):
            await model.train([a])

    loop(tmp_path / "run", work)
    assert agentevo.load_run(tmp_path / "run").audit().ok


@pytest.mark.slow
def test_what_is_committed_while_a_submission_is_checked_is_not_submitted_again(
    tmp_path, monkeypatch
):
    async def work(model):
        service = model.connection._service
        a, b = await gathered(model, *TASKS[:2])
        check = type(service)._check_new
        checked = asyncio.Event()
        go_on = asyncio.Event()

        async def slow(self, groups):
            await check(self, groups)
            if len(groups) == 2 and not checked.is_set():
                here.call_soon_threadsafe(checked.set)
                while not go_on.is_set():
                    await asyncio.sleep(0.01)

        here = asyncio.get_running_loop()
        monkeypatch.setattr(type(service), "_check_new", slow)
        late = asyncio.create_task(model.train([a, b]))
        await checked.wait()
        assert (await model.train([a])).step == 1

        go_on.set()
        with pytest.raises(ConfigError, match="no attempt is trained on twice"):
            await late

        assert (await model.train([b])).step == 2

    loop(tmp_path / "run", work)


@pytest.mark.slow
def test_a_run_that_fails_says_so_to_everybody(tmp_path, monkeypatch, capfd):
    """Each gets an exception of its own, at once, and nothing else is said of it."""
    from agentevo.runs.orchestration.submissions import SubmittedRollouts

    async def fails(self, step, tasks):
        raise TrainingError("the disk is full")

    async def work(model):
        monkeypatch.setattr(SubmittedRollouts, "round", fails)
        groups = await gathered(model, TASKS[0])
        asking = [model.train(groups), *(gathered(model, TASKS[1]) for _ in range(5))]
        raised = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(raised[0], TrainingError)

        for _ in range(3):
            with pytest.raises(AgentEvoError, match="disk is full") as first:
                await gathered(model, TASKS[2])
            with pytest.raises(AgentEvoError, match="disk is full") as second:
                await model.refresh()
            assert first.value is not second.value
            assert len(first.traceback) < 40

    with pytest.raises(TrainingError, match="disk is full"):
        loop(tmp_path / "run", work)

    gc.collect()
    said = capfd.readouterr().err
    for word in ("never", "Event loop is closed", "Traceback"):
        assert word not in said


def test_who_asks_a_loop_that_ends_is_answered():
    """Whatever moment it ends at: before the work has begun, within it, or long ago."""
    begun = threading.Event()
    go_on = threading.Event()
    ended = threading.Event()
    calls = Calls(lambda: EngineUnavailableError("over"))

    async def host():
        calls.begin()
        begun.set()
        await asyncio.to_thread(go_on.wait)
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)

    def run():
        own = asyncio.new_event_loop()
        hosting = own.create_task(host())

        own.run_forever()
        for task in asyncio.all_tasks(own):
            task.cancel()

        own.run_until_complete(asyncio.sleep(0))
        assert hosting.done()

        ended.wait()
        own.close()
        calls.end()

    async def answer():
        return 3

    async def program():
        assert await calls.call(answer()) == 3
        assert calls.call_now(lambda: 4, 10) == 4
        with pytest.raises(ValueError, match="own"):
            await calls.call(failing())

        within = asyncio.create_task(calls.call(asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        go_on.set()

        with pytest.raises(EngineUnavailableError, match="over"):
            await within

        unheard = answer()
        before = asyncio.create_task(calls.call(unheard))  # the loop has stopped for good
        await asyncio.sleep(0.05)
        ended.set()

        with pytest.raises(EngineUnavailableError, match="over"):
            await before
        assert inspect.getcoroutinestate(unheard) == inspect.CORO_CLOSED

        thread.join(300)
        with pytest.raises(EngineUnavailableError, match="over"):
            await calls.call(answer())

    async def failing():
        raise ValueError("own")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(300)

    asyncio.run(asyncio.wait_for(program(), 300))
