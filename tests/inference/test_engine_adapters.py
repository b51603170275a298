"""The engine serves adapters that are not merged into the base: log-probs against PEFT's own model,
switching, several over one base."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from adapted_models import adapted
from slow import soak

from agentevo.config import LoraSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.adapters import load_adapter, use_adapter, write_adapter
from agentevo.models.compute.attention import prepare
from agentevo.models.files.model_copy import copy_policy
from agentevo.types import SamplingParams

SECTIONS = {
    "lora": LoraSection(rank=4),
    "dora": LoraSection(rank=4, dora=True),
    "bias": LoraSection(rank=4, bias="lora_only"),
}
PROMPTS = [[5, 9, 60, 3], [5, 9, 60, 3, 41, 8, 22], [7], list(range(2, 50))]
PARAMS = [
    SamplingParams(temperature=1.0, max_new_tokens=10, seed=seed) for seed in range(len(PROMPTS))
]


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("name", ["qwen2", *soak("gemma2", "llama", "qwen3", "mistral")])
def test_log_probs_are_those_of_the_model_with_its_adapter(
    name, kind, random_model, complete, difference
):
    alone = adapted(random_model(name).alone, SECTIONS[kind])
    engine = TorchEngine(prepare(copy.deepcopy(alone)))
    plain = 0.0
    for prompt, params, completion in zip(
        PROMPTS, PARAMS, complete(engine, PROMPTS, PARAMS), strict=True
    ):
        ids = [*prompt, *completion.ids]
        assert difference(logits_of(alone, ids), prompt, completion, params) < 1e-4
        with alone.disable_adapter():
            plain = max(plain, difference(logits_of(alone, ids), prompt, completion, params))

    assert plain > 0.01, "without the adapter they would be others"


@pytest.mark.slow
def test_publishing_another_adapter(random_model, complete, difference, tmp_path):
    base = random_model("qwen2").alone
    models = {}
    served = copy.deepcopy(base)
    for seed, name in enumerate(["first", "second"]):
        models[name] = adapted(base, LoraSection(rank=2 + seed), seed)
        (tmp_path / name).mkdir()
        write_adapter(models[name], tmp_path / name)
        served = load_adapter(served, tmp_path / name, name)

    engine = TorchEngine(prepare(served))
    for version, name in enumerate(["second", "first", "second"], start=1):
        asyncio.run(engine.publish(version, adapter=name))
        for prompt, params, completion in zip(
            PROMPTS, PARAMS, complete(engine, PROMPTS, PARAMS), strict=True
        ):
            assert (
                difference(
                    logits_of(models[name], [*prompt, *completion.ids]), prompt, completion, params
                )
                < 1e-4
            )
            assert set(completion.versions) == {version}

    with pytest.raises(EngineError, match=r"no adapter 'third' .*first, second"):
        asyncio.run(engine.publish(4, adapter="third"))

    assert engine.version == 3


@pytest.mark.slow
def test_two_engines_serve_two_adapters_over_one_base_at_once(random_model, difference, tmp_path):
    base = random_model("llama").alone
    alone = [adapted(base, LoraSection(rank=2), seed) for seed in (1, 2)]
    shared = copy.deepcopy(base)
    for index, model in enumerate(alone):
        (tmp_path / str(index)).mkdir()
        write_adapter(model, tmp_path / str(index))
        shared = load_adapter(shared, tmp_path / str(index), f"a{index}")

    shared.requires_grad_(False)
    one = prepare(shared)
    other = copy_policy(prepare(shared))
    use_adapter(one, "a0")
    use_adapter(other, "a1")
    assert {p.data_ptr() for p in one.parameters()} == {p.data_ptr() for p in other.parameters()}, (
        "nothing is there twice"
    )

    engines = [TorchEngine(one), TorchEngine(other)]

    async def together():
        calls = [
            e.generate(list(p), s, deadline_s=300)
            for e in engines
            for p, s in zip(PROMPTS, PARAMS, strict=True)
        ]
        return await asyncio.gather(*calls)

    found = asyncio.run(together())
    for index, completion in enumerate(found):
        model = alone[index // len(PROMPTS)]
        (prompt, params) = list(zip(PROMPTS, PARAMS, strict=True))[index % len(PROMPTS)]
        assert (
            difference(logits_of(model, [*prompt, *completion.ids]), prompt, completion, params)
            < 1e-4
        )


def test_publishing_adapter_weights_needs_no_base(random_model, complete, difference):
    alone = adapted(random_model("qwen2").alone, LoraSection(rank=2), seed=3)
    engine = TorchEngine(prepare(adapted(random_model("qwen2").alone, LoraSection(rank=2), seed=4)))
    complete(engine, PROMPTS, PARAMS)
    weights = {name: p.detach() for name, p in alone.named_parameters() if p.requires_grad}
    asyncio.run(engine.publish(1, weights))

    for prompt, params, completion in zip(
        PROMPTS, PARAMS, complete(engine, PROMPTS, PARAMS), strict=True
    ):
        assert (
            difference(logits_of(alone, [*prompt, *completion.ids]), prompt, completion, params)
            < 1e-4
        )

    with pytest.raises(EngineError, match="missing"):
        asyncio.run(engine.publish(2, dict(list(weights.items())[1:])))
