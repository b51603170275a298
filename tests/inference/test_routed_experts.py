"""The engine records which experts it chose for every token, wherever the token's keys and values
came from: they are those that one pass over the whole text chooses."""

from __future__ import annotations

import asyncio
import copy

import msgspec
import numpy as np
import pytest
import torch
from slow import soak

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.serving.messages import Completed, read_answers
from agentevo.models.compute.routers import Recording, enable_routing, routers_of
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Completion, Sample, SamplingParams
from agentevo.types.routed_experts import RoutedExperts

RECORDS = EngineSection(routed_experts=True)
SHORT = list(range(5, 30))
LONG = [5 + (7 * n) % 80 for n in range(150)]
SESSION = "one"


@pytest.fixture(scope="module", params=["qwen3-moe", *soak("mixtral")])
def model(request, random_model):
    return enable_routing(copy.deepcopy(random_model(request.param).model))


def chosen(model, ids: list[int]) -> np.ndarray:
    """[len(ids), layers, top_k] of one pass over the text, in float32 without near ties."""
    sample = Sample.given("t", "g", ids, [False] + [True] * (len(ids) - 1))
    batch = pack([sample], torch.device("cpu"))
    recording = Recording(routers_of(model))
    with torch.no_grad():
        token_logprobs(model, batch.with_routing(recording))
    return recording.rows()[batch.plan.tree.paths[0]]


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool((np.sort(found) == np.sort(wanted)).all())


def check(model, prompt: list[int], completion: Completion, start: int = 0) -> None:
    ids = [*prompt, *completion.ids]
    assert completion.routed_experts is not None
    assert same(completion.routed_experts.array(), chosen(model, ids)[start:-1])


def params(seed: int, tokens: int = 12, start: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, routed_from=start)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"prefill_tokens": 16}, *soak({}, {"prefix_sharing": False})])
def test_shared_prefixes_chunks_and_company(settings, model, complete):
    """Prefixes that are copied (25 tokens) and that are referred to (150), prompts that begin
    alike, and one alone."""
    section = RECORDS.model_copy(update=settings)
    prompts = [*[SHORT] * 3, *[LONG] * 3, [*LONG, 4, 4], [*LONG[:140], 9], [8]]
    engine = TorchEngine(model, config=section)
    for _ in range(2):  # the second time from the cache
        asked = [params(n, tokens=3 + 4 * n) for n in range(len(prompts))]
        for prompt, found in zip(prompts, complete(engine, prompts, asked), strict=True):
            check(model, prompt, found)

    hits = engine.stats()["engine/prefix_hit_tokens"]
    assert (hits > 0) == section.prefix_sharing


@pytest.mark.slow
def test_turns_of_a_session(model):
    """Each tells what is new, from the last token of the turn before on; one that branches off
    earlier, too, and one whose cache was dropped."""
    engine = TorchEngine(model, config=RECORDS)

    async def talk() -> None:
        async def ask(prompt: list[int], start: int) -> list[int]:
            found = await engine.generate(
                prompt, params(len(prompt), start=start), session=SESSION, deadline_s=300
            )
            check(model, prompt, found, start)
            return [*prompt, *found.ids]

        first = await ask(SHORT, 0)
        second = await ask([*first, 3, 4, 5], len(first) - 1)
        assert engine.stats()["engine/session_hit_tokens"] > 0

        await ask([*first, 6], len(first) - 1)
        await engine.forget_cache()
        await ask([*second, 7, 7], len(second) - 1)

    asyncio.run(talk())


@pytest.mark.slow
def test_new_weights_within_a_completion(model):
    """A token's row is of the weights that drew the next one; the context that is computed again
    under the new ones changes nothing of what was told. Interrupted three times, once before
    anything was drawn and once before the context was there again."""
    models = [copy.deepcopy(model) for _ in range(4)]
    with torch.no_grad():
        for number, one in enumerate(models):
            draws = torch.Generator().manual_seed(number)
            for name, weight in one.named_parameters():
                if "gate.weight" in name:
                    weight.add_(torch.randn(weight.shape, generator=draws) * 0.5)

    engine = TorchEngine(
        copy.deepcopy(models[0]), config=RECORDS.model_copy(update={"prefill_tokens": 16})
    )
    asked = params(3, tokens=30)

    async def talk() -> Completion:
        async def drawn(count: int) -> None:
            while engine.stats()["engine/generated_tokens"] < count:
                await asyncio.sleep(0)

        async def publish(version: int) -> None:
            weights = {name: p.detach() for name, p in models[version].named_parameters()}
            await engine.publish(version, weights, in_flight="continue")

        task = asyncio.ensure_future(engine.generate(SHORT, asked, deadline_s=300))
        while engine.stats()["engine/steps"] < 1:
            await asyncio.sleep(0)
        assert not engine.stats()["engine/generated_tokens"]

        await publish(1)
        await drawn(10)
        await publish(2)

        steps = engine.stats()["engine/steps"]
        while engine.stats()["engine/steps"] < steps + 1:
            await asyncio.sleep(0)

        await publish(3)
        return await task

    found = asyncio.run(talk())
    ids = [*SHORT, *found.ids]
    rows = found.routed_experts
    assert rows is not None and set(found.versions) == {1, 3}

    for version in (1, 3):
        of_version = chosen(models[version], ids)
        places = [
            len(SHORT) + n - 1 for n, drawn_by in enumerate(found.versions) if drawn_by == version
        ]
        assert places and same(rows.array()[places], of_version[places])

    before = list(range(len(SHORT) - 1))  # the prompt: of the pass before the first draw
    assert same(rows.array()[before], chosen(models[1], ids)[before])

    other = chosen(models[3], ids)
    assert not same(rows.array()[before], other[before]), "else nothing could be told apart"


@pytest.mark.slow
def test_rows_of_an_earlier_version_that_goes_on_serving(model):
    engine = TorchEngine(copy.deepcopy(model), config=RECORDS)

    async def talk() -> Completion:
        engine.keep(1)
        weights = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
        await engine.publish(1, weights)
        return await engine.serving(0).generate(SHORT, params(1), deadline_s=300)

    found = asyncio.run(talk())
    assert set(found.versions) == {0}

    check(model, SHORT, found)


@pytest.mark.slow
def test_who_does_not_record_tells_nothing(model, random_model, complete):
    (found,) = complete(TorchEngine(model), [SHORT], [params(1)])
    assert found.routed_experts is None
    with pytest.raises(EngineError, match=r"engine.routed_experts: .* .*enable_routing\(model\)"):
        TorchEngine(random_model("mixtral").model, config=RECORDS)
    with pytest.raises(EngineError, match="routed_from=-1 must be at least 0"):
        complete(TorchEngine(model, config=RECORDS), [SHORT], [params(1, start=-1)])


def test_records_travel_from_an_engine_of_another_process():
    rows = RoutedExperts.of(np.arange(24).reshape(4, 3, 2) % 5, 5)
    found = Completion(
        ids=[1], logprobs=[-1.0], versions=[0], finish_reason="stop", routed_experts=rows
    )
    frame = msgspec.msgpack.encode([Completed(id=1, completion=found)])
    (answer,) = read_answers(frame)
    assert answer.completion == found

    broken = frame.replace(rows.data, rows.data[:-1] + b"\x05")
    with pytest.raises(msgspec.ValidationError, match="expert 5 of 5"):
        read_answers(broken)
