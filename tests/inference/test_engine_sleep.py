"""An engine that sleeps computes nothing and holds no memory; nobody who waited for it can tell
afterwards."""

from __future__ import annotations

import asyncio
import copy
import random
import time

import pytest
import torch

from agentevo.config import EngineSection
from agentevo.errors import DeadlineExceededError, EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.types import SamplingParams

LENGTHS = [30, 30, 150, 7]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


PROMPTS = [prompt_of(length) for length in LENGTHS]
PARAMS = [SamplingParams(max_new_tokens=16 + 4 * i, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture
def llama(random_model):
    return random_model("llama").model


@pytest.fixture
def own(random_model):
    """A model of this test's own, whose weights it may change."""
    return copy.deepcopy(random_model("llama"))


def ask_all(engine: TorchEngine) -> list[asyncio.Task]:
    return [
        asyncio.create_task(
            engine.generate(prompt, one, session=f"s{i}" if i % 2 else None, deadline_s=300)
        )
        for i, (prompt, one) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


async def until_generated(engine: TorchEngine, tokens: int) -> None:
    async with asyncio.timeout(300):
        while engine.stats()["engine/generated_tokens"] < tokens:
            await asyncio.sleep(0)


def holds_nothing(engine: TorchEngine) -> bool:
    scheduler = engine.scheduler
    return (
        not (scheduler.cache.keys or scheduler.segments or scheduler.sessions or scheduler.running)
        and scheduler.memory_tokens() == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_asleep_nothing_is_computed_nor_held_and_afterwards_nothing_shows(
    in_flight, llama, complete
):
    engine = TorchEngine(llama)
    expected = complete(TorchEngine(llama), PROMPTS, PARAMS)

    async def work():
        running = ask_all(engine)
        await until_generated(engine, 30)
        assert engine.stats()["engine/kv_tokens"] > 0

        await engine.sleep(in_flight=in_flight, deadline_s=300)
        await engine.sleep(in_flight=in_flight, deadline_s=300)
        late = asyncio.create_task(engine.generate(PROMPTS[0], PARAMS[0], deadline_s=300))
        before = engine.stats()
        await asyncio.sleep(0.05)
        assert engine.asleep and holds_nothing(engine)

        after = engine.stats()
        assert before["engine/steps"] == after["engine/steps"]
        assert after["engine/asleep_s"] - before["engine/asleep_s"] >= 0.05
        assert [one.done() for one in running] == [in_flight == "finish"] * len(running)
        assert not late.done()

        await engine.wake()
        await engine.wake()
        assert not engine.asleep
        return await asyncio.gather(*running), await late

    found, late = asyncio.run(work())
    for one, wanted in zip([*found, late], [*expected, expected[0]], strict=True):
        assert one.ids == wanted.ids
        assert one.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert one.versions == [0] * len(one.ids)

    slept = engine.stats()["engine/asleep_s"]
    assert 0.05 <= slept == engine.stats()["engine/asleep_s"], (
        "it stands still while the engine is awake"
    )


@pytest.mark.slow
def test_deadlines_stand_still_while_the_engine_sleeps(llama, complete):
    """Of a request that was running, and of one that comes meanwhile; a sleep that is longer than
    both."""
    engine = TorchEngine(llama)
    deadline_s = 10.0
    long = SamplingParams(max_new_tokens=40, seed=3)

    async def work():
        running = asyncio.create_task(engine.generate(PROMPTS[0], long, deadline_s=deadline_s))
        await until_generated(engine, 3)
        await engine.sleep(in_flight="continue")
        late = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS[1], deadline_s=deadline_s))
        await asyncio.sleep(deadline_s + 0.5)

        assert not running.done() and not late.done()
        assert engine.slept_s > deadline_s

        await engine.wake()
        return [await running, await late]

    found = asyncio.run(work())
    wanted = complete(TorchEngine(llama), PROMPTS[:2], [long, PARAMS[1]])
    assert [one.ids for one in found] == [one.ids for one in wanted]


@pytest.mark.slow
def test_a_deadline_runs_on_when_the_engine_is_awake_again(llama, monkeypatch):
    engine = TorchEngine(llama)
    step = engine._step

    def slow() -> int:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(engine, "_step", slow)

    async def work():
        await engine.sleep()
        asked = asyncio.create_task(
            engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=900), deadline_s=0.3)
        )
        await asyncio.sleep(0.5)
        await engine.wake()
        woken = time.monotonic()

        with pytest.raises(DeadlineExceededError, match=r"within 0\.3 s \(1 running, 0 waiting\)"):
            await asked
        assert time.monotonic() - woken > 0.2

        await engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=2), deadline_s=300)

    asyncio.run(work())
    assert engine.stats()["engine/running"] == engine.stats()["engine/waiting"] == 0


def test_a_request_that_is_given_up_while_the_engine_sleeps_is_never_computed(llama):
    engine = TorchEngine(llama)

    async def work():
        await engine.sleep()
        asked = asyncio.create_task(engine.generate(PROMPTS[0], PARAMS[0], deadline_s=300))
        await asyncio.sleep(0.05)

        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

        await engine.wake()
        await engine.generate(PROMPTS[3], SamplingParams(max_new_tokens=2), deadline_s=300)

    asyncio.run(work())
    assert engine.stats()["engine/generated_tokens"] == 2


@pytest.mark.slow
def test_weights_that_come_while_it_sleeps_serve_when_it_wakes(own, difference):
    """A request in the middle goes on under them, and each of its tokens says so."""
    engine = TorchEngine(own.model)
    old = copy.deepcopy(own)
    weights = {name: parameter.detach() * 1.2 for name, parameter in own.model.named_parameters()}

    async def work():
        running = asyncio.create_task(
            engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=24, seed=3), deadline_s=300)
        )
        await until_generated(engine, 10)
        await engine.sleep(in_flight="continue", deadline_s=300)
        await engine.publish(1, weights)
        assert engine.asleep and engine.version == 1 and not running.done()
        await engine.wake()
        return await running

    found = asyncio.run(work())
    own.alone.load_state_dict({name: weights[name] for name in weights}, strict=False)
    assert set(found.versions) == {0, 1} and found.versions == sorted(found.versions)

    by_version = [
        one.logits(PROMPTS[0] + found.ids).log_softmax(-1)[len(PROMPTS[0]) - 1 :]
        for one in (old, own)
    ]
    for place, (token, logprob, version) in enumerate(
        zip(found.ids, found.logprobs, found.versions, strict=True)
    ):
        assert logprob == pytest.approx(float(by_version[version][place, token]), abs=1e-4), place


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sleep", "publish"])
@pytest.mark.parametrize("ends", ["late", "cancelled"])
def test_what_could_not_wait_for_running_requests_changes_nothing(what, ends, own):
    """Neither the weights nor who is served: requests that came meanwhile are admitted at once."""
    engine = TorchEngine(own.model)
    held = copy.deepcopy(own.model.state_dict())
    weights = {name: parameter.detach() * 1.2 for name, parameter in own.model.named_parameters()}

    async def work():
        long = asyncio.create_task(
            engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=900), deadline_s=300)
        )
        await until_generated(engine, 3)
        call = (
            engine.sleep
            if what == "sleep"
            else lambda **options: engine.publish(1, weights, **options)
        )
        waiting = asyncio.create_task(
            call(in_flight="finish", deadline_s=0.05 if ends == "late" else 300)
        )
        await asyncio.sleep(0.01)
        meanwhile = asyncio.create_task(engine.generate(PROMPTS[3], PARAMS[3], deadline_s=300))

        if ends == "cancelled":
            waiting.cancel()

        with pytest.raises(DeadlineExceededError if ends == "late" else asyncio.CancelledError):
            await waiting

        found = await meanwhile
        assert not long.done()

        long.cancel()
        return found

    assert asyncio.run(work()).versions == [0] * PARAMS[3].max_new_tokens
    assert engine.version == 0 and not engine.asleep
    assert engine.stats()["engine/refused_publishes"] == (what == "publish")
    assert all(torch.equal(held[name], tensor) for name, tensor in own.model.state_dict().items())


@pytest.mark.slow
def test_one_publish_at_a_time_and_the_older_one_is_refused(own):
    engine = TorchEngine(own.model)
    scaled = {
        v: {name: p.detach() * (1 + v / 10) for name, p in own.model.named_parameters()}
        for v in (1, 2)
    }

    async def work():
        running = ask_all(engine)
        await until_generated(engine, 10)
        outcome = await asyncio.gather(
            engine.publish(2, scaled[2], in_flight="finish"),
            engine.publish(1, scaled[1], in_flight="continue"),
            return_exceptions=True,
        )
        return outcome, await asyncio.gather(*running)

    (newer, older), found = asyncio.run(work())
    assert newer is None
    assert isinstance(older, EngineError) and "version 1 is not newer than 2" in str(older)
    assert {version for one in found for version in one.versions} == {0}, (
        "the first one let them end"
    )
    assert all(
        torch.equal(tensor, dict(own.model.named_parameters())[name])
        for name, tensor in scaled[2].items()
    )

    stats = engine.stats()
    assert (stats["engine/publishes"], stats["engine/refused_publishes"]) == (1, 1)
    assert stats["engine/swap_s"] > 0


def test_weights_are_verified_in_a_thread_for_one_engine_only(own, random_model):
    engine = TorchEngine(own.model)
    weights = {
        name: parameter.detach().double() * 1.2 for name, parameter in own.model.named_parameters()
    }

    async def work():
        verified = await asyncio.to_thread(engine.verify, weights)
        with pytest.raises(EngineError, match="verified for another engine's model"):
            await TorchEngine(copy.deepcopy(own.model)).publish(1, verified)
        await engine.publish(1, verified)

    asyncio.run(work())
    assert all(
        torch.equal(weights[name].float(), tensor) for name, tensor in own.model.named_parameters()
    )

    weights["model.norm.weight"] = torch.full((32,), 1e300, dtype=torch.float64)
    with pytest.raises(EngineError, match=r"model\.norm\.weight holds NaN or infinity"):
        engine.verify(weights)  # finite, but not as the float32 that the model would hold

    assert engine.stats()["engine/refused_publishes"] == 1


@pytest.mark.slow
def test_who_waits_for_a_tool_holds_no_slot_that_another_needs(llama, complete):
    """Memory for two conversations, five of them: each is idle for a while, four others use its
    place, and it goes on as if nothing had been."""
    section = EngineSection(kv_cache_tokens=256, prefix_sharing=False)
    engine = TorchEngine(llama, config=section)
    prompts = [prompt_of(80, seed) for seed in range(5)]
    params = [SamplingParams(max_new_tokens=10, seed=seed) for seed in range(5)]

    async def turn(index: int, ids: list[int]):
        return await engine.generate(ids, params[index], session=f"s{index}", deadline_s=300)

    async def work():
        first = [await turn(index, ids) for index, ids in enumerate(prompts)]
        assert len(engine.scheduler.sessions) == 2, "two fit, the others have made room"

        longer = [[*ids, *one.ids, 9, 9, 9] for ids, one in zip(prompts, first, strict=True)]
        computed = engine.stats()["engine/computed_tokens"]
        newest_first = await asyncio.gather(
            *(turn(index, longer[index]) for index in reversed(range(5)))
        )
        second = newest_first[::-1]

        assert engine.stats()["engine/session_hit_tokens"] > 0, "the two that were still there"
        assert engine.stats()["engine/computed_tokens"] - computed > 3 * 80, (
            "the evicted ones are computed again"
        )
        return longer, second

    longer, second = asyncio.run(work())
    for found, wanted in zip(second, complete(TorchEngine(llama), longer, params), strict=True):
        assert found.ids == wanted.ids
