"""Between two event loops: order, batches, cancellation, and loops that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading

import pytest

from agentevo.agents.gateway.bridge import Bridge, Mailbox
from agentevo.agents.gateway.refusals import Refusal


@contextlib.contextmanager
def sampler_of(gateway):
    """A bridge from this loop to a loop in a thread of its own."""
    ready = threading.Event()
    bridge = []
    stop = []

    async def live():
        bridge.append(Bridge(gateway))
        stop.append(asyncio.Event())
        ready.set()
        await stop[0].wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(300)

    try:
        yield bridge[0]
    finally:
        with contextlib.suppress(RuntimeError):
            bridge[0].sampler.call_soon_threadsafe(stop[0].set)
        thread.join(300)


def crossed(test):
    async def work():
        with sampler_of(asyncio.get_running_loop()) as bridge:
            return await asyncio.wait_for(test(bridge), 300)

    return asyncio.run(work())


def test_what_is_sent_together_wakes_the_loop_once_and_keeps_its_order():
    async def work():
        loop = asyncio.get_running_loop()
        wakes = []
        calls = []
        mailbox = Mailbox(loop)
        receive = mailbox._receive
        mailbox._receive = lambda: (wakes.append(len(calls)), receive())
        for number in range(100):
            mailbox.send(calls.append, number)

        await asyncio.sleep(0)
        return wakes, calls

    wakes, calls = asyncio.run(work())
    assert wakes == [0]
    assert calls == list(range(100))


def test_a_call_that_fails_keeps_none_of_the_others_back():
    async def work():
        loop = asyncio.get_running_loop()
        calls = []
        failures = []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        mailbox = Mailbox(loop)
        mailbox.send(calls.append, 1)
        mailbox.send([].pop)
        mailbox.send(calls.append, 2)
        await asyncio.sleep(0.01)
        return calls, failures

    calls, failures = asyncio.run(work())
    assert calls == [1, 2]
    assert [type(failure) for failure in failures] == [IndexError]


def test_work_runs_over_there_in_its_context_and_what_it_tells_arrives_before_its_result():
    name = contextvars.ContextVar("name", default="nobody's")

    async def test(bridge):
        here = threading.get_ident()
        heard = []

        async def work():
            for number in range(10):
                bridge.tell(heard.append, number)
            return name.get(), threading.get_ident()

        context = contextvars.copy_context()
        context.run(name.set, "the attempt's")
        said, there = await bridge.submit(work(), context)
        return said, there != here, len(heard)

    assert crossed(test) == ("the attempt's", True, 10)


def test_what_the_work_raises_is_raised_here():
    async def test(bridge):
        async def work():
            raise KeyError("x")

        with pytest.raises(KeyError):
            await bridge.submit(work(), contextvars.copy_context())

    crossed(test)


def test_giving_up_cancels_the_work():
    async def test(bridge):
        begun = threading.Event()
        cancelled = threading.Event()

        async def work():
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        answer = bridge.submit(work(), contextvars.copy_context())
        assert await asyncio.to_thread(begun.wait, 300)

        answer.cancel()
        return await asyncio.to_thread(cancelled.wait, 300)

    assert crossed(test)


@pytest.mark.parametrize("begun", [True, False])
def test_work_that_the_sampler_cancels_is_a_conflict_and_no_cancellation_here(begun):
    async def test(bridge):
        async def work():
            await asyncio.sleep(60)

        def cancel_all():
            for task in asyncio.all_tasks():
                if "_Crossing" in repr(task):
                    task.cancel()

        answer = bridge.submit(work(), contextvars.copy_context())
        if begun:
            await asyncio.sleep(0.05)

        bridge.send(cancel_all)
        with pytest.raises(Refusal) as refused:
            await answer

        return refused.value.status

    assert crossed(test) == 409


def test_a_sampler_that_has_ended_takes_nothing():
    async def work():
        with sampler_of(asyncio.get_running_loop()) as bridge:
            pass

        async def late(): ...

        with pytest.raises(RuntimeError):
            bridge.submit(late(), contextvars.copy_context())

    asyncio.run(work())
