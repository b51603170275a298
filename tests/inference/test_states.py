"""The embedded engine with models that compute rows: every log-prob is the one that a full forward
pass of transformers gives, however the states are kept. Quick, but for one test."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
import torch
from slow import slow, soak

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.state_scheduler import StateScheduler
from agentevo.inference.embedded.states import state_support
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.rows import row_settings
from agentevo.types import Completion, SamplingParams

NAMES = ["qwen3-next", "lfm2", "gpt-oss-rows", "mamba", "bloom", "minimax", "rwkv"]
TOLERANCE = 1e-4


def make_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


OPENING = make_prompt(40, 1)
PROMPTS = [
    *[OPENING] * 3,
    *[[*OPENING, *make_prompt(n, n)] for n in (2, 9)],
    make_prompt(1, 3),
    make_prompt(33, 5),
]
"""Equal prompts, common beginnings, and prompts that share nothing."""


def make_params(index: int, max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(
        temperature=(1.0, 0.0, 1.7)[index % 3], max_new_tokens=max_new_tokens, seed=index
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "support"),
    [
        ("qwen3-next", (True, True, True)),
        ("lfm2", (True, True, True)),
        ("gpt-oss-rows", (True, True, True)),
        ("mamba", (True, False, True)),
        ("bloom", (True, True, True)),
        ("minimax", (True, False, False)),
        ("rwkv", (False, False, False)),
    ],
)
def test_what_a_models_states_support(name, support, random_model):
    model = random_model(name).model
    assert row_settings(model) is not None
    measured = state_support(model)
    assert (measured.continues, measured.appends, measured.stacks) == support
    assert measured.size(200) >= measured.size(100) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, *slow(False)], ids=["shared", "unshared"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_in_company(name, sharing, random_model, complete, difference):
    policy = random_model(name)
    engine = TorchEngine(policy.model, config=EngineSection(prefix_sharing=sharing))
    params = [make_params(index) for index in range(len(PROMPTS))]
    completions = complete(engine, PROMPTS, params)
    for prompt, param, completion in zip(PROMPTS, params, completions, strict=True):
        logits = policy.logits(prompt + completion.ids)
        assert difference(logits, prompt, completion, param) < TOLERANCE

    shares = sharing and state_support(policy.model).continues
    assert (engine.stats()["engine/prefix_hit_tokens"] > 0) is shares


@pytest.mark.parametrize("name", ["lfm2", "gpt-oss-rows"])
def test_the_last_chunk_of_a_shared_prefix_is_one_token(name, random_model, complete, difference):
    """That token is computed in the stack, from which the prefix takes its state."""
    policy = random_model(name)
    engine = TorchEngine(policy.model, config=EngineSection(prefill_tokens=16))
    prompts = [make_prompt(18, 1)] * 3
    params = [make_params(index) for index in range(3)]
    for prompt, param, completion in zip(
        prompts, params, complete(engine, prompts, params), strict=True
    ):
        logits = policy.logits(prompt + completion.ids)
        assert difference(logits, prompt, completion, param) < TOLERANCE

    assert engine.stats()["engine/prefix_hit_tokens"] == 3 * 17


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "gpt-oss-rows"])
def test_a_prompt_of_which_a_step_computes_one_token(name, random_model, difference):
    """The next turn of a session has 5 new tokens. The step has room for one of them only."""
    policy = random_model(name)
    engine = TorchEngine(policy.model, config=EngineSection(prefill_tokens=16))

    async def ask() -> list[tuple[list[int], Completion]]:
        opening = make_prompt(20, 1)
        first = await engine.generate(opening, make_params(0), session="s", deadline_s=60)
        prompts = [make_prompt(31, 2), [*opening, *first.ids, *make_prompt(4, 3)]]
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, make_params(0), session=session, deadline_s=60)
                for prompt, session in zip(prompts, (None, "s"), strict=True)
            )
        )
        return list(zip(prompts, completions, strict=True))

    for prompt, completion in asyncio.run(ask()):
        logits = policy.logits(prompt + completion.ids)
        assert difference(logits, prompt, completion, make_params(0)) < TOLERANCE

    assert engine.stats()["engine/session_hit_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss-rows", "mamba"])
def test_memory_for_a_few_only(name, random_model, complete, difference):
    """Requests queue, the youngest ones return to the queue, and prefixes are dropped."""
    policy = random_model(name)
    size = state_support(policy.model).size
    memory = size(60) + 2 * size(50)
    engine = TorchEngine(
        policy.model,
        config=EngineSection(kv_cache_tokens=memory, max_running=5, prefill_tokens=16),
    )
    params = [make_params(index, 3 + 5 * (index % 3)) for index in range(len(PROMPTS))]
    completions = complete(engine, PROMPTS, params)
    for prompt, param, completion in zip(PROMPTS, params, completions, strict=True):
        logits = policy.logits(prompt + completion.ids)
        assert difference(logits, prompt, completion, param) < TOLERANCE

    assert engine.stats()["engine/kv_tokens"] <= memory


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_turns_of_sessions(name, random_model, difference):
    """Three conversations of three turns; each turn extends the one before it, and the last turn of
    one of them goes back."""
    policy = random_model(name)
    engine = TorchEngine(policy.model)
    checked = []

    async def converse(index: int) -> None:
        context = [*OPENING, *make_prompt(index, index)]
        for turn in range(3):
            params = make_params(10 * index + turn, max_new_tokens=4 + index)
            if index == 1 and turn == 2:
                context = context[:45]
            completion = await engine.generate(context, params, session=f"s{index}", deadline_s=300)
            checked.append((context, params, completion))
            context = [*context, *completion.ids, *make_prompt(3 + index + turn, turn)]
        await engine.release(f"s{index}")

    async def converse_together() -> None:
        await asyncio.gather(*(converse(index) for index in range(3)))

    asyncio.run(converse_together())
    assert len(checked) == 9
    for context, params, completion in checked:
        logits = policy.logits(context + completion.ids)
        assert difference(logits, context, completion, params) < TOLERANCE

    continues = state_support(policy.model).continues
    assert (engine.stats()["engine/session_hit_tokens"] > 4 * len(OPENING)) is continues
    assert not engine.scheduler.sessions
    assert isinstance(engine.scheduler, StateScheduler)
    assert not engine.scheduler.stacks


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_given_tokens(name, random_model):
    policy = random_model(name)
    engine = TorchEngine(policy.model, config=EngineSection(prefill_tokens=16))
    ids = make_prompt(20, 8)
    scores = asyncio.run(engine.score(OPENING, ids, deadline_s=300))
    logits = policy.logits([*OPENING, *ids])[len(OPENING) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["continue", *soak("finish")])
def test_new_weights_drop_all_states(in_flight, random_model, difference):
    policy = random_model("qwen3-next")
    model = copy.deepcopy(policy.model)
    engine = TorchEngine(model)
    changed = {name: p + 0.05 for name, p in model.state_dict().items() if "norm" in name}

    async def run() -> tuple[object, object]:
        params = SamplingParams(temperature=1.0, max_new_tokens=40, seed=1)
        running = asyncio.create_task(engine.generate(OPENING, params, session="a", deadline_s=300))
        while not engine.scheduler.running or len(engine.scheduler.running[0].ids) < 50:
            await asyncio.sleep(0)
        await engine.publish(1, model.state_dict() | changed, in_flight=in_flight, deadline_s=300)
        interrupted = await running
        later = await engine.generate(OPENING, params, deadline_s=300)
        return interrupted, later

    interrupted, later = asyncio.run(run())
    assert set(later.versions) == {1}
    assert set(interrupted.versions) == ({0} if in_flight == "finish" else {0, 1})
    alone = copy.deepcopy(policy.alone)
    alone.load_state_dict(changed, strict=False)
    with torch.no_grad():
        logits = alone(input_ids=torch.tensor([OPENING + later.ids]), use_cache=False).logits[0]
    params = SamplingParams(temperature=1.0, max_new_tokens=40, seed=1)
    assert difference(logits, OPENING, later, params) < TOLERANCE


def test_after_a_pass_that_fails_nothing_of_it_is_left(random_model, complete, difference):
    policy = random_model("qwen3-next")
    engine = TorchEngine(policy.model)
    params = [make_params(index) for index in range(3)]
    layer = policy.model.get_output_embeddings()
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("out of memory")

    hook = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            complete(engine, PROMPTS[:3], params)
    finally:
        hook.remove()

    assert not layer._forward_pre_hooks
    completions = complete(engine, PROMPTS[:3], params)
    for prompt, param, completion in zip(PROMPTS[:3], params, completions, strict=True):
        logits = policy.logits(prompt + completion.ids)
        assert difference(logits, prompt, completion, param) < TOLERANCE


@pytest.mark.parametrize("name", soak("lfm2", "qwen3-next", "gpt-oss-rows", "mamba", "minimax"))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_short", [True, False], ids=["short of memory", "enough memory"])
def test_requests_come_and_go(name, seed, is_short, random_model, difference):
    """Soak. Conversations of other lengths, some cancelled in the middle of an answer, some whose
    history was edited, some that stop early."""
    policy = random_model(name)
    draw = random.Random(seed)
    size = state_support(policy.model).size
    memory = {"kv_cache_tokens": size(110) + size(60)} if is_short else {}
    engine = TorchEngine(
        policy.model,
        config=EngineSection(prefill_tokens=16, max_running=draw.choice([3, 16]), **memory),
    )
    openings = [make_prompt(length, length) for length in (5, 17, 40)]
    checked = []

    async def converse(index: int) -> None:
        await asyncio.sleep(draw.random() / 20)
        context = [*draw.choice(openings), *make_prompt(draw.randrange(1, 25), index)]
        session = f"s{index}" if draw.random() < 0.6 else None
        for turn in range(draw.choice([1, 1, 3])):
            params = SamplingParams(
                temperature=1.0,
                max_new_tokens=draw.choice([1, 2, 9, 20]),
                seed=10 * index + turn,
                stop_token_ids=(draw.randrange(2, 97),),
            )
            request = asyncio.create_task(
                engine.generate(context, params, session=session, deadline_s=300)
            )
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() / 20)
                request.cancel()
            try:
                completion = await request
            except asyncio.CancelledError:
                continue

            checked.append((context, params, completion))
            is_edited = draw.random() < 0.2
            kept = context[: len(context) // 2] if is_edited else [*context, *completion.ids]
            context = [*kept, *make_prompt(draw.randrange(1, 6), turn)]

        if session is not None:
            await engine.release(session)

    async def converse_together() -> None:
        await asyncio.gather(*(converse(index) for index in range(16)))

    asyncio.run(converse_together())
    assert len(checked) > 8
    for context, params, completion in checked:
        logits = policy.logits(context + completion.ids)
        assert difference(logits, context, completion, params) < TOLERANCE

    scheduler = engine.scheduler
    assert isinstance(scheduler, StateScheduler)
    assert not (scheduler.running or scheduler.waiting or scheduler.sessions or scheduler.stacks)
