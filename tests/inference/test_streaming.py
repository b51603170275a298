"""Tokens as they are drawn: what the listener of a request is told by the embedded engine, over a
connection, and when its engine dies. Its engines wait where the test says, so that the order of
events decides and no clock."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from fake_engines import FakeEngine, some, until
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from agentevo.errors import (
    EngineError,
    EngineUnavailableError,
    ListenerError,
    StreamDivergedError,
)
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.serving import messages
from agentevo.inference.serving.messages import (
    DrawnTokens,
    Generate,
    Outbox,
    StateReport,
    WatchRequest,
    read_answers,
)
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.token_listeners import StreamedTokens
from agentevo.types import Completion, SamplingParams
from examples import examples

PARAMS = SamplingParams(max_new_tokens=12, seed=3)


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def __call__(self, ids, logprobs) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.calls += 1

    def heard(self, completion: Completion) -> bool:
        return (self.ids, self.logprobs) == (completion.ids, completion.logprobs)


def raising(error: BaseException):
    def listen(ids, logprobs) -> None:
        raise error

    return listen


async def steps_until(condition) -> None:
    """Gives the engine of this loop no step more than it takes."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def llama(random_model):
    return random_model("llama").model


def test_a_token_is_told_before_the_next_step_begins(llama, monkeypatch):
    engine = TorchEngine(llama)
    events = []
    ear = Ear()
    step = engine._step

    def counted() -> int:
        events.append("step")
        return step()

    monkeypatch.setattr(engine, "_step", counted)

    def listen(ids, logprobs) -> None:
        events.append("told")
        ear(ids, logprobs)

    async def work():
        completion = await engine.generate([5, 6, 7], PARAMS, deadline_s=300, listen=listen)
        events.append("completed")
        return completion

    assert ear.heard(asyncio.run(work()))
    assert events == [*["step", "told"] * 12, "completed"]


@pytest.mark.slow
def test_each_request_has_its_own_listener_or_none(llama):
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 97) for _ in range(rng.randint(1, 70))] for _ in range(6)]
    params = [SamplingParams(max_new_tokens=rng.randint(1, 15), seed=i) for i in range(6)]
    ears = [Ear() if i % 3 else None for i in range(6)]

    async def work(listeners):
        engine = TorchEngine(llama)
        return await asyncio.gather(
            *(
                engine.generate(prompt, one, session=f"{i}", deadline_s=300, listen=listener)
                for i, (prompt, one, listener) in enumerate(
                    zip(prompts, params, listeners, strict=True)
                )
            )
        )

    completions = asyncio.run(work(ears))
    assert asyncio.run(work([None] * 6)) == completions, "who listens changes nothing"
    assert all(
        ear.heard(completion) for ear, completion in zip(ears, completions, strict=True) if ear
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()], ids=repr)
def test_a_listener_that_raises_ends_its_own_request_alone(llama, error):
    async def work():
        engine = TorchEngine(llama)
        for session in (None, "a"):
            failing = engine.generate(
                [5, 6], PARAMS, session=session, deadline_s=300, listen=raising(error)
            )
            other = engine.generate([7, 8], PARAMS, deadline_s=300)
            failed, completion = await asyncio.gather(failing, other, return_exceptions=True)
            assert isinstance(failed, ListenerError) and failed.__cause__ is error
            assert type(error).__name__ in str(failed)
            assert completion == await engine.generate([7, 8], PARAMS, deadline_s=300)
            assert engine.failure is None and not engine.scheduler.running

        assert engine.stats()["engine/generated_tokens"] == 2 + 4 * 12, "it drew one token each"

    asyncio.run(work())


def test_nothing_is_told_twice_after_an_interruption(llama):
    async def work():
        engine = TorchEngine(llama)
        ear = Ear()
        request = asyncio.create_task(
            engine.generate([5, 6, 7], PARAMS, deadline_s=300, listen=ear)
        )
        await steps_until(lambda: len(ear.ids) == 3)
        await engine.publish(1, in_flight="continue")
        await steps_until(lambda: len(ear.ids) == 6)
        await engine.sleep(in_flight="continue")
        told = len(ear.ids)
        await engine.wake()
        completion = await request
        assert ear.heard(completion) and ear.calls == 12
        assert told == 6 and completion.versions == [0] * 3 + [1] * 9

    asyncio.run(work())


def test_requests_for_an_earlier_version_are_streamed_too(llama):
    async def work():
        engine = TorchEngine(llama)
        ear = Ear()
        pinned = engine.serving(0)
        assert ear.heard(await pinned.generate([5, 6], PARAMS, deadline_s=300, listen=ear))
        assert ear.calls == 12

    asyncio.run(work())


class Drawing(FakeEngine):
    """Draws `tokens` one after the other, each when the test lets it (`let` more); ends by
    `failure` where there is one. Tells nobody anything if it is `silent`."""

    def __init__(self, number: int, version: int = 3) -> None:
        super().__init__(number, version)
        self.tokens = [7, 8, 9, 10]
        self.let = 10**6
        self.silent = False
        self.listeners = 0
        self.failure: BaseException | None = None

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        self.asked.append((prompt_ids, sampling, session, deadline_s))
        self.listeners += listen is not None

        self.running += 1
        try:
            for token in self.tokens:
                await until(lambda: self.let > 0)
                self.let -= 1
                if listen is not None and not self.silent:
                    listen([token], [-token / 4])
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

        if self.failure is not None:
            raise self.failure

        return Completion(
            ids=self.tokens,
            logprobs=[-token / 4 for token in self.tokens],
            versions=[self.version] * len(self.tokens),
            finish_reason="stop",
        )


def test_the_first_token_comes_before_the_completion_is_finished(tmp_path):
    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            engine = engines.by_name["e1"]
            ear = Ear()
            engine.let = 1
            request = asyncio.create_task(client.generate([5], PARAMS, deadline_s=300, listen=ear))
            await until(lambda: ear.ids == [7])
            assert engine.running == 1 and not request.done()

            engine.let = 2
            await until(lambda: len(ear.ids) == 3)
            assert not request.done()

            engine.let = 1
            assert ear.heard(await request)
            assert engine.listeners == 1

    asyncio.run(work())


def test_no_tokens_come_after_the_answer_which_has_them_all(tmp_path):
    class AtOnce(Drawing):
        async def generate(self, prompt_ids, sampling, *, listen, **more):
            listen([1, 2], [-1.0, -2.0])
            if prompt_ids == [6]:
                raise EngineError("no")
            return Completion(ids=[1, 2], logprobs=[-1, -2], versions=[3, 3], finish_reason="stop")

    async def work():
        async with some(tmp_path, 1, kind=AtOnce) as (engines, _client):
            (announcement,) = engines.directory.living(5.0)
            url = announcement.url.replace("http", "ws") + messages.PATH
            header = RunSecret(tmp_path).header()
            async with asyncio.timeout(300), connect(url, additional_headers=header) as websocket:
                requests = [
                    Generate(
                        id=1 + n, prompt_ids=[5 + n], sampling=PARAMS, deadline_s=300, stream=True
                    )
                    for n in range(2)
                ]
                await websocket.send(msgspec.msgpack.encode(requests))
                came = []
                while len(came) < 2:
                    frame = read_answers(await websocket.recv(decode=False))
                    came += [one for one in frame if not isinstance(one, StateReport)]

                await websocket.send(msgspec.msgpack.encode([WatchRequest(id=3, every_s=60)]))
                came += read_answers(await websocket.recv(decode=False))
                assert [type(one).__name__ for one in came] == [
                    "Completed",
                    "FailedRequest",
                    "StateReport",
                ]

    asyncio.run(work())


def test_nobody_is_streamed_to_who_does_not_listen(tmp_path):
    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            completion = await client.generate([5], PARAMS, deadline_s=300)
            assert completion.ids == [7, 8, 9, 10]
            assert engines.by_name["e1"].listeners == 0

    asyncio.run(work())


def test_of_an_engine_that_tells_nothing_the_listener_hears_in_the_end(tmp_path):
    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            engines.by_name["e1"].silent = True
            ear = Ear()
            assert ear.heard(await client.generate([5], PARAMS, deadline_s=300, listen=ear))
            assert ear.calls == 1

    asyncio.run(work())


def test_a_listener_that_raises_ends_its_request_in_the_other_process_too(tmp_path):
    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            engine = engines.by_name["e1"]
            ear = Ear()
            error = ValueError("no")
            engine.let = 0
            failing, other = (
                asyncio.create_task(client.generate([5], PARAMS, deadline_s=300, listen=listen))
                for listen in (raising(error), ear)
            )
            await until(lambda: engine.running == 2)
            engine.let = 2

            with pytest.raises(ListenerError, match="ValueError: no") as raised:
                await failing
            assert raised.value.__cause__ is error

            await until(lambda: engine.cancelled == 1)
            engine.let = 10**6
            assert ear.heard(await other)
            assert len(engine.asked) == 2, "no other engine was asked"

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["the engine goes", "its step fails"])
def test_another_engine_goes_on_where_the_first_one_died(tmp_path, leaves):
    """It draws the request again with the same seed; the listener hears what is new to it."""

    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            first = engines.by_name["e1"]
            ear = Ear()
            first.let = 2
            first.failure = EngineError("the engine's step failed")
            request = asyncio.create_task(client.generate([5], PARAMS, deadline_s=300, listen=ear))
            await until(lambda: ear.ids == [7, 8])

            second = await engines.start(2, kind=Drawing)
            second.let = 3
            await client.refresh()

            if leaves == "the engine goes":
                await engines.leave["e1"].aclose()
            else:
                first.tokens[2:] = []
                first.let = 10

            await until(lambda: second.asked and ear.ids == [7, 8, 9])
            assert not request.done() and second.asked[0][:2] == first.asked[0][:2]

            second.let += 1
            assert ear.heard(await request), "each token once"

    asyncio.run(work())


@pytest.mark.parametrize("drawn", [[7, 99, 9], [7]], ids=str)
def test_a_request_ends_when_another_engine_draws_other_tokens(tmp_path, drawn):
    async def work():
        async with some(tmp_path, 1, kind=Drawing) as (engines, client):
            first = engines.by_name["e1"]
            ear = Ear()
            first.let = 2
            request = asyncio.create_task(client.generate([5], PARAMS, deadline_s=300, listen=ear))
            await until(lambda: ear.ids == [7, 8])

            second = await engines.start(2, kind=Drawing)
            second.tokens = drawn
            await client.refresh()
            await engines.leave["e1"].aclose()

            with pytest.raises(StreamDivergedError, match="newer weights"):
                await request

            assert ear.ids == [7, 8] and len(second.asked) == 1
            assert issubclass(StreamDivergedError, EngineUnavailableError), "nobody's reward is 0"

    asyncio.run(work())


def test_tokens_leave_the_engine_s_process_before_its_next_step(llama, tmp_path, monkeypatch):
    engine = TorchEngine(llama)
    steps = 0
    step = engine._step
    send = WebSocket.send_bytes
    sent: dict[int, int] = {}

    def counted() -> int:
        nonlocal steps
        steps += 1
        return step()

    async def watched(self, frame) -> None:
        await send(self, frame)
        for message in read_answers(frame):
            if isinstance(message, DrawnTokens):
                sent[len(sent) + 1] = steps

    monkeypatch.setattr(engine, "_step", counted)
    monkeypatch.setattr(WebSocket, "send_bytes", watched)

    class Real(FakeEngine):
        async def generate(self, *arguments, **more):
            return await engine.generate(*arguments, **more)

    async def work():
        async with some(tmp_path, 1, kind=Real) as (_engines, client):
            ear = Ear()
            completion = await client.generate([5, 6, 7], PARAMS, deadline_s=300, listen=ear)
            assert ear.heard(completion)

    asyncio.run(work())
    assert len(sent) >= 11, "the last may be in the answer alone"
    assert all(number == steps_so_far for number, steps_so_far in sent.items())


TOKENS = st.tuples(st.just("tokens"), st.integers(0, 3), st.integers(1, 3 * messages.MAX_TOKENS))
OTHERS = st.tuples(st.sampled_from(["frame", "answer", "drop"]), st.integers(0, 3), st.just(1))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.one_of(TOKENS, OTHERS), max_size=30))
def test_tokens_wait_as_one_list_and_never_change_their_order(events):
    outbox = Outbox()
    put: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    answers: list[int] = []

    def take() -> bool:
        frame = outbox.frame()
        if frame is None:
            return False
        assert len(frame) <= messages.FRAME_BYTES + 20 * messages.MAX_TOKENS

        for message in read_answers(frame):
            if isinstance(message, DrawnTokens):
                assert 1 <= len(message.ids) == len(message.logprobs) <= messages.MAX_TOKENS
                assert message.logprobs == [-token / 2 for token in message.ids]
                got.setdefault(message.id, []).extend(message.ids)
            else:
                answers.append(message.id)

        return True

    for number, (event, request, size) in enumerate(events):
        if event == "tokens":
            before = len(put.setdefault(request, []))
            ids = list(range(before, before + size))
            put[request] += ids
            outbox.put_tokens(request, ids, [-token / 2 for token in ids])
        elif event == "answer":
            outbox.put(messages.failure_of(1000 + number, EngineError("no")))
        elif event == "drop":
            outbox.drop_tokens(request)
            assert put.get(request, [])[: len(got.get(request, []))] == got.get(request, [])
            put[request] = got.setdefault(request, []).copy()
        else:
            take()

    assert len(outbox) + len(answers) == sum(event == "answer" for event, *_ in events)
    while take():
        pass

    assert {r: ids for r, ids in got.items() if ids} == {r: ids for r, ids in put.items() if ids}
    assert answers == sorted(answers) and len(outbox) == 0


def test_a_listener_is_told_each_token_once_however_the_engine_cuts_them():
    ear = Ear()
    streamed = StreamedTokens(ear)
    streamed.add([1, 2], [-1.0, -2.0])
    streamed.begin()
    streamed.add([1], [-9.0])
    streamed.add([2, 3, 4], [-9.0, -3.0, -4.0])

    completion = Completion(
        ids=[1, 2, 3, 4, 5], logprobs=[-9.0] * 5, versions=[0] * 5, finish_reason="stop"
    )
    streamed.finish(completion)

    assert ear.ids == completion.ids and ear.calls == 3
    assert ear.logprobs == [-1.0, -2.0, -3.0, -4.0, -9.0]
