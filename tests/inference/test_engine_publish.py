"""New weights: verified before anything changes, and every token says which weights it came
from."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.types import SamplingParams

PROMPT = list(range(5, 35))
LONG = SamplingParams(max_new_tokens=24, seed=3)


@pytest.fixture
def one(random_model):
    """A model of this test's own, and transformers' copy of it."""
    return copy.deepcopy(random_model("llama"))


def new_weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() * 1.2 for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"unknown \['extra'\]"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \(3,\), the engine \(32,\)",
        ),
        (
            lambda weights: weights["model.norm.weight"].fill_(float("nan")),
            "model.norm.weight holds NaN or infinity",
        ),
        (
            lambda weights: weights["model.norm.weight"][0].fill_(float("inf")),
            "model.norm.weight holds NaN or infinity",
        ),
    ],
)
def test_bad_weights_are_refused_and_the_old_ones_go_on_serving(spoil, problem, one, complete):
    engine = TorchEngine(one.model)
    before = complete(engine, [PROMPT], [LONG])
    held = copy.deepcopy(one.model.state_dict())
    weights = new_weights(one.model)
    spoil(weights)

    with pytest.raises(EngineError, match=f"weights refused, nothing changed: .*{problem}"):
        asyncio.run(engine.publish(1, weights))

    assert engine.version == 0
    assert all(torch.equal(held[name], tensor) for name, tensor in one.model.state_dict().items())
    assert complete(engine, [PROMPT], [LONG]) == before


@pytest.mark.parametrize("version", [3, 2])
def test_versions_only_grow(version, one):
    engine = TorchEngine(one.model)
    asyncio.run(engine.publish(3))
    with pytest.raises(EngineError, match=f"version {version} is not newer than 3"):
        asyncio.run(engine.publish(version))
    assert engine.version == 3


@pytest.mark.slow
def test_after_a_publish_nothing_old_is_left_in_a_cache(one, complete, difference):
    """A session and a shared prefix from before: both are computed again."""
    engine = TorchEngine(one.model)

    async def ask():
        return await engine.generate(PROMPT, LONG, session="a", deadline_s=300)

    asyncio.run(ask())
    complete(engine, [PROMPT] * 3, [LONG] * 3)
    weights = new_weights(one.model)
    asyncio.run(engine.publish(1, weights))

    with torch.no_grad():
        for name, parameter in one.alone.named_parameters():
            parameter.copy_(weights[name])

    for found in [asyncio.run(ask()), *complete(engine, [PROMPT] * 3, [LONG] * 3)]:
        assert found.versions == [1] * 24
        assert difference(one.logits(PROMPT + found.ids), PROMPT, found, LONG) < 1e-4


@pytest.mark.slow
def test_weights_changed_in_place_are_served_after_begin(one, complete, difference):
    engine = TorchEngine(one.model)
    complete(engine, [PROMPT] * 3, [LONG] * 3)
    with torch.no_grad():
        for module in (one.model, one.alone):
            for parameter in module.parameters():
                parameter.mul_(1.2)

    asyncio.run(engine.begin(0))
    (found,) = complete(engine, [PROMPT], [LONG])
    assert difference(one.logits(PROMPT + found.ids), PROMPT, found, LONG) < 1e-4
    assert found.versions == [0] * 24


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_requests_in_flight(in_flight, one, difference):
    """`finish`: they end on the old weights, new ones wait. `continue`: each token comes from the
    weights that it says it does."""
    engine = TorchEngine(one.model)
    old = copy.deepcopy(one)
    weights = new_weights(one.model)
    prompts = [PROMPT, PROMPT, PROMPT[:7], [*PROMPT, 4, 4, 4]]

    async def work():
        running = [
            asyncio.create_task(
                engine.generate(
                    prompt,
                    SamplingParams(max_new_tokens=24, seed=i),
                    session=f"s{i}" if i % 2 else None,
                    deadline_s=300,
                )
            )
            for i, prompt in enumerate(prompts)
        ]
        while engine.stats()["engine/generated_tokens"] < 30:
            await asyncio.sleep(0)

        publishing = asyncio.create_task(engine.publish(1, weights, in_flight=in_flight))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(PROMPT, LONG, deadline_s=300))
        await publishing

        return await asyncio.gather(*running), await late

    found, late = asyncio.run(work())
    with torch.no_grad():
        for name, parameter in one.alone.named_parameters():
            parameter.copy_(weights[name])

    assert late.versions == [1] * 24
    assert difference(one.logits(PROMPT + late.ids), PROMPT, late, LONG) < 1e-4
    for index, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
        ids = prompt + completion.ids
        versions = completion.versions
        assert versions == sorted(versions)
        assert len(versions) == 24
        assert set(versions) == ({0} if in_flight == "finish" else {0, 1})

        by_version = {0: old.logits(ids).log_softmax(-1), 1: one.logits(ids).log_softmax(-1)}
        for place, (token, logprob, version) in enumerate(
            zip(completion.ids, completion.logprobs, versions, strict=True)
        ):
            row = by_version[version][len(prompt) - 1 + place]
            assert logprob == pytest.approx(float(row[token]), abs=1e-4), (
                f"request {index}, token {place}"
            )


@pytest.mark.slow
def test_a_resumed_engine_counts_on_from_its_checkpoint(one, complete):
    engine = TorchEngine(one.model)
    asyncio.run(engine.begin(7))
    assert complete(engine, [PROMPT], [LONG])[0].versions == [7] * 24
    asyncio.run(engine.publish(8))
    assert engine.version == 8
