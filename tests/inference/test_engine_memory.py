"""Key-value memory stays within its budget at every step, and nobody waits for ever, whatever comes
and goes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import soak

from agentevo.config import EngineSection
from agentevo.errors import RequestTooLongError
from agentevo.inference.embedded.kv_cache import KEY_BLOCK
from agentevo.inference.embedded.scheduler import GROWTH_TOKENS, _shared_beginnings, common_prefix
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.types import Completion, SamplingParams
from examples import examples


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


OPENINGS = [
    [],
    tokens_of(20, 1),
    tokens_of(90, 2),
    tokens_of(140, 3),
    tokens_of(140, 3)[:100],
    tokens_of(220, 4),
]


@dataclass(frozen=True)
class Ask:
    """One request of a mix: when it comes (in steps of the engine), what it asks, whether it is
    taken back, whose turn it is."""

    after: int
    opening: int
    own: int
    new: int
    cancel_after: int | None = None
    session: str | None = None

    @property
    def prompt(self) -> list[int]:
        return [*OPENINGS[self.opening], *tokens_of(self.own, self.own)]


asks = st.builds(
    Ask,
    after=st.integers(0, 12),
    opening=st.integers(0, len(OPENINGS) - 1),
    own=st.integers(1, 40) | st.just(2),
    new=st.integers(1, 24),
    cancel_after=st.none() | st.integers(0, 10),
    session=st.none() | st.sampled_from(["a", "b"]),
)


def real_tokens(engine: TorchEngine) -> int:
    """What the tensors of one layer really hold: slots times places, the shared prefixes and the
    idle sessions."""
    scheduler = engine.scheduler
    keys = scheduler.cache.keys[:1]
    slots = sum(layer.shape[0] * layer.shape[2] for layer in keys)
    segments = [s for group in scheduler.segments.values() for s in group.values()]
    idle = [sequence.saved for sequence in scheduler.sessions.values()]
    outside = [k.keys[0].shape[1] for k in [*segments, *idle] if k is not None]
    return KEY_BLOCK * (slots + sum(outside))


async def watch(engine: TorchEngine, budget: int, mix: list[asyncio.Task]) -> None:
    """Looks at the engine between any two steps until everyone has an answer."""
    scheduler = engine.scheduler
    steps = -1
    idle_looks = 0
    while not all(task.done() for task in mix):
        assert real_tokens(engine) <= scheduler.memory_tokens() <= budget
        assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
        for sequence in scheduler.running:
            assert sequence.cached - sequence.offset <= sequence.need <= scheduler.cache.capacity
            drawn_since = 1  # the next step makes room for it first
            assert len(sequence.ids) - sequence.offset <= sequence.need + drawn_since

        now = engine.stats()["engine/steps"]
        idle_looks = idle_looks + 1 if now == steps and scheduler.waiting else 0
        assert idle_looks < 100, "requests wait and the engine stands still"
        assert now < 4000, "steps go on and on and nobody is answered"

        steps = now
        await asyncio.sleep(0)


async def play(
    engine: TorchEngine, mix: list[Ask], budget: int
) -> list[Completion | BaseException]:
    async def one(index: int, ask: Ask) -> Completion:
        for _ in range(3 * ask.after):
            await asyncio.sleep(0)

        params = SamplingParams(max_new_tokens=ask.new, seed=index)
        request = asyncio.create_task(
            engine.generate(ask.prompt, params, session=ask.session, deadline_s=300)
        )
        if ask.cancel_after is not None:
            for _ in range(3 * ask.cancel_after):
                await asyncio.sleep(0)
            request.cancel()

        return await request

    tasks = [asyncio.create_task(one(index, ask)) for index, ask in enumerate(mix)]
    watcher = asyncio.create_task(watch(engine, budget, tasks))
    _done, _ = await asyncio.wait([watcher, *tasks], return_when=asyncio.ALL_COMPLETED, timeout=0.1)

    while not watcher.done():
        await asyncio.wait([watcher], timeout=5)

    watcher.result()
    return await asyncio.gather(*tasks, return_exceptions=True)


def check(name, random_model, difference, mix: list[Ask], engine: TorchEngine, budget: int) -> None:
    one = random_model(name)
    for index, (ask, found) in enumerate(
        zip(mix, asyncio.run(play(engine, mix, budget)), strict=True)
    ):
        if isinstance(found, asyncio.CancelledError):
            assert ask.cancel_after is not None
        elif isinstance(found, RequestTooLongError):
            assert len(ask.prompt) + ask.new > budget - 32
        else:
            assert isinstance(found, Completion), found
            params = SamplingParams(max_new_tokens=ask.new, seed=index)
            assert len(found.ids) == ask.new
            assert difference(one.logits(ask.prompt + found.ids), ask.prompt, found, params) < 1e-4

    stats = engine.stats()
    assert stats["engine/running"] == stats["engine/waiting"] == 0
    assert not engine.scheduler.pending_prefixes

    asyncio.run(engine.release("a"))
    asyncio.run(engine.release("b"))
    assert all(
        not segment.users
        for group in engine.scheduler.segments.values()
        for segment in group.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", *soak("llama")])
def test_any_mix_of_requests(name, random_model, difference, monkeypatch):
    @settings(max_examples=examples(30), deadline=None, derandomize=True)
    @given(
        st.lists(asks, min_size=1, max_size=14),
        st.integers(160, 640),
        st.integers(1, 6),
        st.sampled_from([16, 64, 4096]),
        st.booleans(),
        st.sampled_from([1, 9, GROWTH_TOKENS]),
    )
    @example([Ask(0, 2, 2, 20), Ask(0, 2, 2, 20)], 160, 4, 4096, True, 256)
    @example([Ask(0, 3, 2, 20), Ask(0, 3, 2, 20)], 165, 4, 4096, True, 256)
    @example([Ask(0, 3, 2, 20)] * 2 + [Ask(2, 2, 2, 20)] * 2, 256, 4, 4096, True, 256)
    @example([Ask(0, 3, 2, 20)] * 2 + [Ask(1, 2, 2, 30)] * 2, 224, 4, 16, True, 256)
    @example(
        [Ask(0, 5, 1, 10, session="a"), Ask(4, 5, 9, 20, session="a"), Ask(4, 3, 9, 20)],
        288,
        4,
        64,
        True,
        256,
    )
    @example([Ask(0, 0, 2, 24), Ask(0, 0, 3, 24), Ask(0, 0, 4, 24)] * 3, 128, 6, 64, True, 1)
    @example([Ask(0, 3, 2, 24)] * 2 + [Ask(1, 3, 9, 24)] * 2, 224, 4, 16, True, 1)
    def any_mix(mix, budget, max_running, prefill_tokens, sharing, growth):
        monkeypatch.setattr("agentevo.inference.embedded.scheduler.GROWTH_TOKENS", growth)
        section = EngineSection(
            kv_cache_tokens=budget,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            prefix_sharing=sharing,
        )
        check(
            name,
            random_model,
            difference,
            mix,
            TorchEngine(random_model(name).model, config=section),
            budget,
        )

    any_mix()


@pytest.mark.slow
def test_one_request_may_fill_the_whole_memory(random_model, difference):
    """Idle sessions and shared prefixes make way for it, and it does not matter that one of the
    prefixes is its own."""
    engine = TorchEngine(random_model("llama").model, config=EngineSection(kv_cache_tokens=256))
    mix = [
        Ask(0, 3, 2, 10, session="a"),
        Ask(0, 3, 2, 10),
        Ask(0, 3, 5, 10, session="b"),
        *[Ask(9, 5, 4, 32)] * 3,
    ]
    check("llama", random_model, difference, mix, engine, 256)


@pytest.mark.slow
def test_memory_follows_the_tokens_that_are_there(tiny_policy):
    """Not those that might have been drawn; an idle session needs its tokens alone, however long
    others are."""
    engine = TorchEngine(tiny_policy(context_length=65536).model)
    any_token = tuple(range(engine.model.config.vocab_size))

    def ask(session: str, length: int, max_new_tokens: int) -> float:
        prompt = [2 + place % 7 for place in range(length)]
        params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=any_token)
        asyncio.run(engine.generate(prompt, params, session=session, deadline_s=300))
        return engine.stats()["engine/kv_tokens"]

    slot = 10 + GROWTH_TOKENS
    assert ask("large limit", 10, 60000) <= slot + 2 * KEY_BLOCK
    for count in range(10):
        kept = KEY_BLOCK * (2 + count)
        assert ask(f"short {count}", 10, 8) <= slot + KEY_BLOCK + kept

    long = ask("long", 2000, 8)
    assert ask("short again", 10, 8) < long, "the slot of a session that is idle is given back"
    assert ask("short again", 12, 60000) <= slot + 2000 + 15 * KEY_BLOCK
    assert ask("large limit", 12, 60000) <= slot + 2000 + 15 * KEY_BLOCK
    assert engine.stats()["engine/session_hit_tokens"] == 20


def test_a_session_leaves_its_slot_only_for_another_request(random_model):
    """In between nothing is copied, and the next turn is computed from what it left."""
    model = random_model("llama").model
    kept = TorchEngine(model)
    fresh = TorchEngine(model)
    contexts: dict[str, list[int]] = {"a": tokens_of(20, 1), "b": tokens_of(30, 2)}

    def turn(session: str, seed: int) -> None:
        params = SamplingParams(max_new_tokens=8, seed=seed)
        context = contexts[session]
        answer = asyncio.run(kept.generate(context, params, session=session, deadline_s=300))
        again = asyncio.run(fresh.generate(context, params, deadline_s=300))
        assert (answer.ids, answer.logprobs) == (again.ids, again.logprobs)
        contexts[session] = [*context, *answer.ids, *tokens_of(5, seed)]

    def in_slots() -> set[str]:
        sessions = kept.scheduler.sessions
        return {name for name, sequence in sessions.items() if sequence.saved is None}

    turn("a", 1)
    assert in_slots() == {"a"}
    turn("a", 2)
    assert in_slots() == {"a"}
    turn("b", 3)
    assert in_slots() == {"b"}, "there is a slot for one"
    turn("a", 4)
    assert in_slots() == {"a"}
    turn("b", 5)
    assert kept.stats()["engine/session_hit_tokens"] > 3 * 20


PRESSED = [(tokens_of(9, n), SamplingParams(max_new_tokens=60, seed=n)) for n in range(4)]
"""Each fits 128 tokens of memory, and at first there is room for all."""


@pytest.fixture
def pressed(random_model, monkeypatch) -> TorchEngine:
    monkeypatch.setattr("agentevo.inference.embedded.scheduler.GROWTH_TOKENS", 5)
    return TorchEngine(random_model("llama").model, config=EngineSection(kv_cache_tokens=128))


@pytest.mark.slow
def test_who_runs_out_of_room_waits_and_goes_on(pressed, random_model, complete):
    wide = TorchEngine(random_model("llama").model)
    answers = complete(pressed, *zip(*PRESSED, strict=True))
    assert answers == complete(wide, *zip(*PRESSED, strict=True))

    again = pressed.stats()["engine/computed_tokens"] - wide.stats()["engine/computed_tokens"]
    assert again > 0, "somebody was sent back, and what it had drawn was computed again"


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["continue", *soak("finish")])
def test_new_weights_come_while_room_is_short(pressed, in_flight):
    """What was sent back to the queue has begun: it ends on the old weights as well."""

    async def swap() -> list[Completion]:
        asks = [
            asyncio.create_task(pressed.generate(ids, params, deadline_s=300))
            for ids, params in PRESSED
        ]
        while not any(request.is_begun for request in pressed.scheduler.waiting):
            await asyncio.sleep(0)

        await pressed.publish(1, in_flight=in_flight, deadline_s=300)
        return list(await asyncio.gather(*asks))

    answers = asyncio.run(swap())
    assert [len(answer.ids) for answer in answers] == [60] * 4
    assert {answer.versions[0] for answer in answers} == {0}
    assert {answer.versions[-1] for answer in answers} == {0 if in_flight == "finish" else 1}


@pytest.mark.slow
def test_a_small_budget_costs_time_and_not_answers(random_model, complete):
    model = random_model("llama").model
    prompts = [[*OPENINGS[2], *tokens_of(n, n)] for n in range(1, 17)]
    params = [SamplingParams(max_new_tokens=10, seed=n) for n in range(16)]
    wide = TorchEngine(model)
    narrow = TorchEngine(model, config=EngineSection(kv_cache_tokens=300))
    assert [c.ids for c in complete(wide, prompts, params)] == [
        c.ids for c in complete(narrow, prompts, params)
    ]
    assert narrow.stats()["engine/steps"] > wide.stats()["engine/steps"]
    assert wide.stats()["engine/kv_tokens"] > 300


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=2, max_size=10, unique=True)
)
def test_shared_beginnings_are_prefixes_of_two_prompts_at_least(shapes):
    prompts = sorted({(*OPENINGS[opening], *tokens_of(own, own)) for opening, own in shapes})
    prompts = [list(prompt) for prompt in prompts]
    for beginning in _shared_beginnings(prompts):
        sharers = [
            prompt for prompt in prompts if common_prefix(beginning, prompt) == len(beginning)
        ]
        assert len(sharers) >= 2
        assert all(len(prompt) > len(beginning) for prompt in sharers), (
            "one token is left to predict from"
        )


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([2], [1]) == 0


def test_the_cache_takes_no_memory_before_it_is_used(random_model):
    engine = TorchEngine(random_model("llama").model)
    assert engine.stats()["engine/kv_tokens"] == 0
    asyncio.run(engine.generate([5, 6], SamplingParams(max_new_tokens=2), deadline_s=300))
    assert engine.stats()["engine/kv_tokens"] == 32
    assert engine.scheduler.cache.keys[0].dtype == torch.float32
