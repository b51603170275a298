"""Log-probs of given tokens: those that a draw, the trainer and a full forward pass give, whatever
else the engine does meanwhile."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch
from engine_door import a_door
from slow import slow

from agentevo.config import EngineSection
from agentevo.errors import DeadlineExceededError, EngineError, RequestTooLongError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import ScoringEngine
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.models.compute import linear
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample, SamplingParams

LIMIT_S = 120.0


def ids_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


COPIED = ids_of(40, 1)
REFERRED = ids_of(150, 2)
CASES = [
    *[(COPIED, ids_of(n, 10 + n)) for n in (1, 2, 17)],
    *[([*REFERRED, *ids_of(n, n)], ids_of(7, 30 + n)) for n in (1, 9, 60)],
    ([5], [6]),
    ([5], ids_of(90, 3)),
]
"""(context, given tokens): equal contexts, common beginnings, one token behind one token."""


async def scored(engine, cases=CASES, temperature=1.0):
    return await asyncio.gather(
        *(
            engine.score(context, ids, temperature=temperature, deadline_s=LIMIT_S)
            for context, ids in cases
        )
    )


def expected(one, context: list[int], ids: list[int], temperature: float = 1.0) -> np.ndarray:
    logits = one.logits(context + ids)[len(context) - 1 : -1].double() / temperature
    picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids).unsqueeze(1))
    return picked.squeeze(1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"prefill_tokens": 16, "kv_cache_tokens": 640}], ids=repr)
@pytest.mark.parametrize("name", ["llama", *slow("gemma2", "qwen3", "mistral")])
def test_they_are_those_of_a_full_forward_pass(name, section, random_model):
    one = random_model(name)
    engine = TorchEngine(one.model, config=EngineSection(**section))

    async def work():
        answers = await scored(engine, temperature=0.7)
        again = await scored(engine, temperature=0.7)  # with what the first have left in the cache
        return answers, again

    answers, again = asyncio.run(work())
    assert isinstance(engine, ScoringEngine)
    for (context, ids), answer, second in zip(CASES, answers, again, strict=True):
        assert len(answer.logprobs) == len(ids)
        assert np.abs(expected(one, context, ids, 0.7) - answer.logprobs).max() < 1e-4
        assert np.abs(np.subtract(answer.logprobs, second.logprobs)).max() < 1e-5

    assert not engine.scheduler.running and not engine.scheduler.waiting


@pytest.mark.slow
@pytest.mark.skipif(not linear.available(), reason="another library multiplies here")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_drawn_token_has_the_log_prob_that_it_was_drawn_with(temperature, random_model):
    """To the last bit: beside others that draw, with and without a shared prefix."""
    engine = TorchEngine(random_model("llama").model)
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=20, seed=seed) for seed in range(6)
    ]
    prompts = [COPIED, COPIED, REFERRED, REFERRED, [5], ids_of(33, 4)]

    async def work():
        drawn = await asyncio.gather(
            *(
                engine.generate(prompt, param, deadline_s=LIMIT_S)
                for prompt, param in zip(prompts, params, strict=True)
            )
        )
        beside = [
            asyncio.create_task(engine.generate(COPIED, param, deadline_s=LIMIT_S))
            for param in params
        ]
        cases = [(prompt, one.ids) for prompt, one in zip(prompts, drawn, strict=True)]
        answers = await scored(engine, cases, temperature)
        await asyncio.gather(*beside)

        return drawn, answers

    drawn, answers = asyncio.run(work())
    assert [answer.logprobs for answer in answers] == [one.logprobs for one in drawn]


def test_they_are_the_trainers(random_model):
    model = random_model("llama").model
    answers = asyncio.run(scored(TorchEngine(model)))
    for (context, ids), answer in zip(CASES, answers, strict=True):
        mask = np.arange(len(context) + len(ids)) >= len(context)
        sample = Sample.given("one", "group", np.array([*context, *ids]), mask)
        with torch.no_grad():
            logp, _ = token_logprobs(model, pack([sample], torch.device("cpu")))
        assert np.abs(logp.numpy() - answer.logprobs).max() < 1e-4


@pytest.mark.slow
def test_all_of_them_come_from_one_version(random_model):
    """New weights in the middle of a long request: it begins again."""
    one = copy.deepcopy(random_model("llama"))
    engine = TorchEngine(one.model, config=EngineSection(prefill_tokens=16))
    context = ids_of(20, 1)
    ids = ids_of(200, 2)
    weights = {
        name: 0.5 * parameter.detach() + 0.01 for name, parameter in one.model.named_parameters()
    }

    async def work():
        asked = asyncio.create_task(engine.score(context, ids, deadline_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while engine.stats()["engine/steps"] < 6:
                await asyncio.sleep(0)
        assert not asked.done()
        await engine.publish(1, weights, in_flight="continue", deadline_s=LIMIT_S)
        return await asked, await engine.score(context, ids, deadline_s=LIMIT_S)

    interrupted, whole = asyncio.run(work())
    assert interrupted.version == whole.version == 1
    assert np.abs(np.subtract(interrupted.logprobs, whole.logprobs)).max() < 1e-5


def test_what_can_hardly_be_is_a_number(random_model):
    """The smallest probability of a float32 is about 1e-45."""
    one = random_model("llama")
    context = ids_of(10, 1)
    ids = ids_of(30, 2)
    (found,) = asyncio.run(scored(TorchEngine(one.model), [(context, ids)], temperature=0.001))
    assert min(found.logprobs) < -200
    assert all(math.isfinite(logp) and logp <= 0 for logp in found.logprobs)

    wanted = expected(one, context, ids, 0.001)
    assert np.allclose(wanted, found.logprobs, rtol=1e-3, atol=0.2)


@pytest.mark.parametrize(
    ("context", "ids", "options", "error", "words"),
    [
        ([], [1], {}, EngineError, "at least one token each"),
        ([1], [], {}, EngineError, "at least one token each"),
        ([1], [100_000], {}, EngineError, "has token 100000"),
        ([-1], [1], {}, EngineError, "has token -1"),
        ([1], [1], {"temperature": 0.0}, EngineError, "temperature=0.0 must be"),
        ([1], [1], {"temperature": math.nan}, EngineError, "temperature=nan must be"),
        ([1], [1], {"deadline_s": math.nan}, EngineError, "in seconds, not nan"),
        ([1], [1] * 5000, {}, RequestTooLongError, "prompt of 5000 tokens exceeds"),
        ([1] * 50, [1], {"deadline_s": 0.0}, DeadlineExceededError, "within 0 s"),
    ],
)
def test_here_and_over_the_wire_the_same_is_refused(
    context, ids, options, error, words, random_model, tmp_path
):
    given = {"deadline_s": LIMIT_S} | options
    engine = TorchEngine(random_model("llama").model)

    async def work():
        with pytest.raises(error, match=words):
            await engine.score(context, ids, **given)

        if given["deadline_s"] == 0:
            return  # a remote one is not even asked

        async with remote(tmp_path, engine) as client:
            with pytest.raises(error, match=words):
                await client.score(context, ids, **given)

        assert not engine.scheduler.running and not engine.scheduler.waiting

    asyncio.run(work())


def remote(folder, engine) -> AsyncExitStack:
    """A RemoteEngine before this engine's door."""

    class Opened(AsyncExitStack):
        async def __aenter__(self):
            await super().__aenter__()
            door = await self.enter_async_context(a_door(folder, engine=engine))
            client = RemoteEngine([door.address.url], secret=door.secret, poll_s=0.02)
            self.push_async_callback(client.close)
            await client.refresh()
            return client

    return Opened()


def test_over_the_wire_they_are_the_same(random_model, tmp_path):
    engine = TorchEngine(random_model("llama").model)

    async def work():
        async with remote(tmp_path, engine) as client:
            assert isinstance(client, ScoringEngine)
            there = await scored(client)
        assert there == await scored(TorchEngine(engine.model))

    asyncio.run(work())


def test_an_engine_without_scores_says_so(tmp_path):
    async def work():
        async with remote(tmp_path, None) as client:
            with pytest.raises(EngineError, match="can't compute log-probs of given tokens"):
                await client.score([1], [2], deadline_s=300)

    asyncio.run(work())


def test_who_gives_up_leaves_nothing(random_model):
    engine = TorchEngine(random_model("llama").model, config=EngineSection(prefill_tokens=16))

    async def work():
        asked = asyncio.create_task(engine.score(ids_of(20, 1), ids_of(200, 2), deadline_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while engine.stats()["engine/steps"] < 3:
                await asyncio.sleep(0)

        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await engine.score([5], [6], deadline_s=LIMIT_S)).version == 0
        assert not engine.scheduler.running and not engine.scheduler.waiting

    asyncio.run(work())
