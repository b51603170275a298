"""The life of a request: how it ends, what it costs, and that no other request feels it."""

from __future__ import annotations

import asyncio
import random

import pytest
from engine_door import WRONG_SAMPLING
from slow import soak

from agentevo.config import EngineSection, ModelSection, TinyModel
from agentevo.errors import DeadlineExceededError, EngineError, ModelError, RequestTooLongError
from agentevo.inference.embedded import torch_engine
from agentevo.inference.embedded.kv_cache import kv_bytes_per_token
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.files.load import load_model
from agentevo.types import SamplingParams


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


@pytest.fixture
def llama(random_model):
    return random_model("llama").model


async def until(condition) -> None:
    """Gives the engine steps until the condition holds."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", *soak("llama")])
def test_one_request_gives_the_same_tokens_in_any_company(name, random_model, complete):
    model = random_model(name).model
    shared = prompt_of(60, 0)
    prompts = [shared, shared, [*shared, 5, 6, 7], prompt_of(9, 1), prompt_of(80, 2), shared]
    params = [
        SamplingParams(temperature=t, max_new_tokens=15, seed=seed)
        for seed, t in enumerate([1.0, 0.7, 1.0, 0.0, 1.7, 1.0])
    ]
    together = complete(TorchEngine(model), prompts, params)
    for prompt, param, expected in zip(prompts, params, together, strict=True):
        (alone,) = complete(TorchEngine(model), [prompt], [param])
        assert alone.ids == expected.ids
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    assert together[0].ids != together[5].ids, "the same prompt with another seed"


def test_the_same_request_twice_gives_the_same_answer(llama, complete):
    engine = TorchEngine(llama)
    prompts = [prompt_of(20, 0)] * 2
    params = [SamplingParams(max_new_tokens=10, seed=3)] * 2
    first, second = complete(engine, prompts, params)
    assert first.ids == second.ids
    assert complete(engine, prompts[:1], params[:1])[0].ids == first.ids


@pytest.mark.parametrize("wrong", WRONG_SAMPLING, ids=str)
def test_numbers_out_of_range_are_refused_and_no_token_is_drawn(wrong, llama, complete):
    engine = TorchEngine(llama, tokenizer=object())
    with pytest.raises(EngineError, match=rf"sampling: {next(iter(wrong))}.* must be"):
        complete(engine, [[5, 6]], [SamplingParams(**wrong)])
    assert engine.stats()["engine/steps"] == 0


@pytest.mark.slow
def test_a_common_prompt_is_computed_once(llama, complete):
    prompt = prompt_of(200, 0)
    costs = {}
    for sharing in (True, False):
        engine = TorchEngine(llama, config=EngineSection(prefix_sharing=sharing))
        complete(engine, [prompt] * 8, [SamplingParams(max_new_tokens=5, seed=i) for i in range(8)])
        costs[sharing] = engine.stats()["engine/computed_tokens"]
        assert engine.stats()["engine/generated_tokens"] == 40

    assert costs[False] == 8 * (200 + 4)
    assert costs[True] == 199 + 8 * (1 + 4)


def test_a_turn_of_a_session_costs_its_new_tokens_only(llama, complete):
    engine = TorchEngine(llama)
    first_params = SamplingParams(max_new_tokens=7, seed=1)
    second_params = SamplingParams(max_new_tokens=6, seed=2)
    prompt = prompt_of(50, 0)
    added = prompt_of(11, 1)

    async def two_turns():
        first = await engine.generate(prompt, first_params, session="a", deadline_s=300)
        computed = engine.stats()["engine/computed_tokens"]
        assert computed == 50 + 6

        second = await engine.generate(
            [*prompt, *first.ids, *added], second_params, session="a", deadline_s=300
        )
        assert engine.stats()["engine/computed_tokens"] - computed == 1 + 11 + 5, (
            "the last token of the first turn, the new ones, the answer"
        )
        return first, second

    first, second = asyncio.run(two_turns())
    (expected,) = complete(TorchEngine(llama), [[*prompt, *first.ids, *added]], [second_params])
    assert second.ids == expected.ids
    assert second.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_session_that_goes_back_keeps_what_still_holds(llama, complete):
    """An edited history: the cache is used up to the first token that differs, and nothing after it
    leaks into the answer."""
    engine = TorchEngine(llama)
    params = SamplingParams(max_new_tokens=8, seed=5)
    prompt = prompt_of(50, 0)
    edited = [*prompt[:30], *prompt_of(25, 9)]
    same = [*prompt]

    async def turns():
        await engine.generate(prompt, params, session="a", deadline_s=300)
        return [
            await engine.generate(ids, params, session="a", deadline_s=300)
            for ids in (edited, same)
        ]

    for ids, found in zip((edited, same), asyncio.run(turns()), strict=True):
        (expected,) = complete(TorchEngine(llama), [ids], [params])
        assert found.ids == expected.ids

    assert engine.stats()["engine/session_hit_tokens"] == 60


def test_releasing_a_session_frees_it_and_unknown_names_are_fine(llama):
    engine = TorchEngine(llama)

    async def work():
        await engine.generate(
            prompt_of(20, 0), SamplingParams(max_new_tokens=2), session="a", deadline_s=300
        )
        assert list(engine.scheduler.sessions) == ["a"]
        await engine.release("a")
        await engine.release("never heard of")

    asyncio.run(work())
    assert engine.scheduler.sessions == {}


@pytest.mark.slow
def test_one_session_asked_twice_at_once_leaves_nothing_pinned(llama, complete):
    """An agent may ask twice without waiting. Both are answered, and the shared prefix can still be
    dropped afterwards."""
    engine = TorchEngine(llama)
    prompt = prompt_of(140, 0)

    async def work():
        params = [SamplingParams(max_new_tokens=3 + i, seed=i) for i in range(2)]
        found = await asyncio.gather(
            *(engine.generate(prompt, param, session="a", deadline_s=300) for param in params)
        )
        await engine.release("a")
        return params, found

    params, found = asyncio.run(work())
    for one, completion in zip(params, found, strict=True):
        assert completion.ids == complete(TorchEngine(llama), [prompt], [one])[0].ids

    assert [
        segment.users for group in engine.scheduler.segments.values() for segment in group.values()
    ] == [0]


@pytest.mark.slow
def test_stop_tokens_end_a_completion_and_belong_to_it(llama, complete):
    prompt = prompt_of(12, 0)
    (free,) = complete(TorchEngine(llama), [prompt], [SamplingParams(max_new_tokens=20, seed=4)])
    assert free.finish_reason == "length"

    place = next(i for i in range(5, 20) if free.ids[i] not in free.ids[:i])
    stops = (free.ids[place], 96)
    (stopped,) = complete(
        TorchEngine(llama),
        [prompt],
        [SamplingParams(max_new_tokens=20, seed=4, stop_token_ids=stops)],
    )
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: place + 1]
    assert stopped.logprobs == pytest.approx(free.logprobs[: place + 1], abs=1e-5)
    assert len(stopped.versions) == place + 1


@pytest.fixture(scope="module")
def byte_model():
    from agentevo.models.compute.attention import prepare

    shape = TinyModel(
        hidden_size=16, num_layers=1, num_heads=1, tokenizer="byte", context_length=128
    )
    loaded = load_model(ModelSection(name="tiny", device="cpu", tiny=shape))
    return prepare(loaded.model), loaded.tokenizer


@pytest.mark.parametrize(
    ("said", "stops", "expected"),
    [
        ("one two three", ("two",), "one two"),
        ("one two three", ("zzz", "wo t"), "one two t"),
        ("one two three", ("four",), None),
        ("snow ☃☃☃ melts", ("☃☃☃",), "snow ☃☃☃"),
        ("so <answer>up</answer> then", ("</answer>",), "so <answer>up</answer>"),
        ("half of a pair", ("\ud83d", "a p"), "half of a p"),
    ],
)
def test_stop_strings_end_a_completion_wherever_tokens_begin(
    said, stops, expected, byte_model, complete, monkeypatch
):
    """The model is made to say the words; each byte is a token, so every stop string lies across
    several."""
    model, tokenizer = byte_model
    script = tokenizer.encode(said, add_special_tokens=False)
    said_so_far: list[int] = []

    def scripted(logits, params, uniforms, masks, changes):
        said_so_far.append(script[len(said_so_far)])
        return said_so_far[-1:], [-1.0], [()]

    monkeypatch.setattr(torch_engine, "draw_with_alternatives", scripted)
    params = SamplingParams(max_new_tokens=len(script), stop_strings=stops)
    (found,) = complete(TorchEngine(model, tokenizer), [[7, 8, 9]], [params])
    assert tokenizer.decode(found.ids) == (said if expected is None else expected)
    assert found.finish_reason == ("length" if expected is None else "stop")


def test_a_deadline_ends_one_request_and_frees_its_place(llama, complete):
    engine = TorchEngine(llama, config=EngineSection(max_running=2))
    short = SamplingParams(max_new_tokens=6, seed=1)

    async def work():
        late = asyncio.create_task(
            engine.generate(prompt_of(10, 0), SamplingParams(max_new_tokens=1000), deadline_s=0.05)
        )
        fine = await engine.generate(prompt_of(8, 1), short, deadline_s=300)
        with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s.*engine\.timeout_s"):
            await late

        await until(lambda: not engine.scheduler.running)
        return fine, await engine.generate(prompt_of(8, 1), short, deadline_s=300)

    first, again = asyncio.run(work())
    assert first.ids == again.ids == complete(TorchEngine(llama), [prompt_of(8, 1)], [short])[0].ids


def test_cancelling_frees_the_slot_for_who_waits(llama):
    engine = TorchEngine(llama, config=EngineSection(max_running=1))

    async def work():
        first = asyncio.create_task(
            engine.generate(prompt_of(10, 0), SamplingParams(max_new_tokens=1000), deadline_s=300)
        )
        second = asyncio.create_task(
            engine.generate(prompt_of(10, 1), SamplingParams(max_new_tokens=3), deadline_s=300)
        )
        third = asyncio.create_task(
            engine.generate(prompt_of(10, 2), SamplingParams(max_new_tokens=3), deadline_s=300)
        )
        await until(lambda: engine.stats()["engine/generated_tokens"] > 3)
        assert engine.stats()["engine/waiting"] == 2

        second.cancel()
        first.cancel()
        found = await third
        assert engine.stats()["engine/generated_tokens"] < 100

        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await task

        return found

    assert len(asyncio.run(work()).ids) == 3
    assert engine.stats()["engine/running"] == engine.stats()["engine/waiting"] == 0


@pytest.mark.slow
def test_a_cancelled_turn_of_a_session_loses_only_itself(llama, complete):
    engine = TorchEngine(llama)
    prompt = prompt_of(30, 0)
    params = SamplingParams(max_new_tokens=5, seed=2)

    async def work():
        first = await engine.generate(prompt, params, session="a", deadline_s=300)
        longer = [*prompt, *first.ids, 5]
        turn = asyncio.create_task(
            engine.generate(longer, SamplingParams(max_new_tokens=900), session="a", deadline_s=300)
        )
        await until(lambda: engine.stats()["engine/generated_tokens"] > 8)
        turn.cancel()
        return longer, await engine.generate(longer, params, session="a", deadline_s=300)

    longer, found = asyncio.run(work())
    assert found.ids == complete(TorchEngine(llama), [longer], [params])[0].ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "new", "section", "remedy"),
    [
        (
            1000,
            25,
            EngineSection(),
            "context of 1024 tokens: shorten the prompt or lower sampling.max_new_tokens",
        ),
        (
            100,
            61,
            EngineSection(kv_cache_tokens=160),
            "memory of 160 tokens: raise engine.kv_cache_gb",
        ),
    ],
)
def test_what_can_never_fit_is_refused_at_the_door(length, new, section, remedy, llama):
    engine = TorchEngine(llama, config=section)

    async def ask(new_tokens: int):
        return await engine.generate(
            prompt_of(length, 0), SamplingParams(max_new_tokens=new_tokens), deadline_s=300
        )

    with pytest.raises(RequestTooLongError, match=remedy):
        asyncio.run(ask(new))

    assert len(asyncio.run(ask(new - 1)).ids) == new - 1


def test_requests_without_sense_are_refused(llama):
    engine = TorchEngine(llama)
    with pytest.raises(EngineError, match="prompt is empty"):
        asyncio.run(engine.generate([], SamplingParams(), deadline_s=1))
    with pytest.raises(EngineError, match="stop strings need a tokenizer"):
        asyncio.run(engine.generate([5], SamplingParams(stop_strings=("x",)), deadline_s=1))


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [-1, 97, 10**9])
def test_a_token_that_the_model_does_not_know_harms_nobody_else(unknown, llama, complete):
    engine = TorchEngine(llama)
    params = SamplingParams(max_new_tokens=20, seed=1)

    async def work():
        other = asyncio.create_task(engine.generate(prompt_of(10, 0), params, deadline_s=300))
        await until(lambda: engine.stats()["engine/generated_tokens"] > 3)
        with pytest.raises(
            EngineError, match=f"the request has token {unknown}, the model knows 0 to 96"
        ):
            await engine.generate([0, 96, unknown], params, deadline_s=300)
        return await other

    assert (
        asyncio.run(work()).ids == complete(TorchEngine(llama), [prompt_of(10, 0)], [params])[0].ids
    )


@pytest.mark.parametrize(
    "failure", [RuntimeError("out of memory"), ModelError("no sinks"), OSError("disk")], ids=repr
)
def test_a_step_that_fails_answers_everyone_and_the_engine_goes_on(
    failure, llama, complete, monkeypatch
):
    """Even for requests whose shared beginning was waiting to be computed when it failed."""
    engine = TorchEngine(llama, config=EngineSection(max_running=1))
    prompts = [prompt_of(40, 0)] * 3
    params = [SamplingParams(max_new_tokens=4, seed=i) for i in range(3)]

    def fail(*args, **kwargs):
        raise failure

    async def answers():
        first = asyncio.create_task(
            engine.generate(prompt_of(5, 1), SamplingParams(max_new_tokens=900), deadline_s=300)
        )
        await until(lambda: engine.stats()["engine/generated_tokens"] > 2)
        group = [
            asyncio.create_task(engine.generate(p, s, deadline_s=300))
            for p, s in zip(prompts, params, strict=True)
        ]
        await until(lambda: engine.stats()["engine/waiting"] == 4)

        with monkeypatch.context() as patch:
            patch.setattr(llama, "forward", fail)
            return await asyncio.gather(first, *group, return_exceptions=True)

    for error in asyncio.run(answers()):
        assert isinstance(error, EngineError)
        assert not isinstance(error, DeadlineExceededError)
        assert str(failure) in str(error)

    assert engine.stats()["engine/running"] == engine.stats()["engine/waiting"] == 0
    assert engine.failed_steps == 1 and str(failure) in str(engine.failure)
    assert [len(found.ids) for found in complete(engine, prompts, params)] == [4] * 3
    assert engine.failed_steps == 0


def test_memory_of_a_token_is_that_of_its_keys_and_values(random_model):
    assert (
        kv_bytes_per_token(random_model("llama").model) == 2 * 2 * 2 * 8 * 4
    )  # keys and values, layers, heads, width, bytes
    assert kv_bytes_per_token(random_model("qwen3").model) == 2 * 2 * 2 * 16 * 4


def test_the_budget_in_gigabytes_becomes_tokens(llama):
    engine = TorchEngine(llama, config=EngineSection(kv_cache_gb=0.001))
    assert engine.scheduler.kv_tokens == int(0.001 * 2**30 / 256)
