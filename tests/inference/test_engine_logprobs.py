"""Every log-prob that the engine gives is the one that a full forward pass gives, to 1e-4: whatever
runs beside it, however its keys are kept."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from slow import slow, soak

from agentevo.config import EngineSection
from agentevo.inference.embedded.cache_attention import attention
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.types import SamplingParams

ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "mistral",
    "mistral-wide",
    "phi3-wide",
    "gpt-oss",
    "granite-swa",
    "granite-swa-wide",
    "llama4",
]
QUICK = ("llama", "gemma2", "granite-swa-wide", "gpt-oss")
TOLERANCE = 1e-4


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


COPIED = prompt_of(40, 1)
REFERRED = prompt_of(150, 2)
SHORT_OF = [prompt_of(1, 3), prompt_of(5, 4), prompt_of(33, 5)]
PROMPTS = [
    *[COPIED] * 3,
    *[[*COPIED, *prompt_of(n, n)] for n in (2, 9, 17)],
    *[REFERRED] * 3,
    *[[*REFERRED, *prompt_of(n, n)] for n in (1, 30, 64)],
    *SHORT_OF,
]
"""Equal prompts, common beginnings that are copied (under 128 tokens) and referred to, and some
that share nothing."""
KINDS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.3, top_k=5),
    SamplingParams(temperature=1.7, min_p=0.1),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02),
]


def params_of(index: int, max_new_tokens: int = 12) -> SamplingParams:
    kind = KINDS[index % len(KINDS)]
    return SamplingParams(
        temperature=kind.temperature,
        top_p=kind.top_p,
        top_k=kind.top_k,
        min_p=kind.min_p,
        max_new_tokens=max_new_tokens,
        seed=index,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, *soak(False)], ids=["shared", "unshared"])
@pytest.mark.parametrize(
    "name",
    [*QUICK, *slow("llama4"), *soak(*(n for n in ARCHITECTURES if n not in (*QUICK, "llama4")))],
)
def test_in_company(name, sharing, random_model, complete, difference):
    one = random_model(name)
    engine = TorchEngine(one.model, config=EngineSection(prefix_sharing=sharing))
    params = [params_of(index) for index in range(len(PROMPTS))]
    for prompt, wanted, found in zip(
        PROMPTS, params, complete(engine, PROMPTS, params), strict=True
    ):
        assert len(found.ids) == len(found.logprobs) == 12
        assert difference(one.logits(prompt + found.ids), prompt, found, wanted) < TOLERANCE

    sizes = sorted(engine.scheduler.segments)
    assert (sizes and sizes[0] < 128 <= sizes[-1]) if sharing else sizes == [], (
        "both kinds of shared prefix were met, or none"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_attention_and_its_log_sum_exp(dtype):
    q, k, v = (torch.randn(1, 2, count, 16).to(dtype) for count in (3, 40, 40))
    out, lse = attention(q, k, v, None, 0.25, 3.0, with_lse=True)
    scores = 3 * torch.tanh(q.double() @ k.double().transpose(-1, -2) / 12)
    wanted = torch.softmax(scores, -1) @ v.double()
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, *soak(1.0, 1.7)])
@pytest.mark.parametrize("sharing", [True, *soak(False)], ids=["shared", "unshared"])
def test_a_group_at_each_temperature(temperature, sharing, random_model, complete, difference):
    one = random_model("llama")
    engine = TorchEngine(one.model, config=EngineSection(prefix_sharing=sharing))

    prompts = [COPIED] * 8 + [REFERRED] * 8
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=20, seed=seed) for seed in range(16)
    ]
    found = complete(engine, prompts, params)
    for prompt, wanted, completion in zip(prompts, params, found, strict=True):
        assert (
            difference(one.logits(prompt + completion.ids), prompt, completion, wanted) < TOLERANCE
        )

    assert len({tuple(completion.ids) for completion in found}) > 8, "members of a group differ"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", *soak("llama", "mistral")])
def test_with_memory_for_a_few_only(name, random_model, complete, difference):
    """Requests queue, prefixes are dropped and computed again, slots move and grow."""
    one = random_model(name)
    engine = TorchEngine(
        one.model, config=EngineSection(kv_cache_tokens=448, max_running=5, prefill_tokens=48)
    )
    params = [params_of(index, max_new_tokens=3 + 5 * (index % 4)) for index in range(len(PROMPTS))]
    for prompt, wanted, found in zip(
        PROMPTS, params, complete(engine, PROMPTS, params), strict=True
    ):
        assert difference(one.logits(prompt + found.ids), prompt, found, wanted) < TOLERANCE


@pytest.mark.parametrize("prefill_tokens", [*slow(16), *soak(4096)])
@pytest.mark.parametrize("name", ["mistral", *soak("llama")])
def test_long_prompts_in_chunks(name, prefill_tokens, random_model, complete, difference):
    one = random_model(name)
    engine = TorchEngine(one.model, config=EngineSection(prefill_tokens=prefill_tokens))
    prompts = [prompt_of(700, 1), prompt_of(30, 2), prompt_of(530, 3)]
    params = [params_of(index, max_new_tokens=4) for index in range(3)]
    for prompt, wanted, found in zip(
        prompts, params, complete(engine, prompts, params), strict=True
    ):
        assert difference(one.logits(prompt + found.ids), prompt, found, wanted) < TOLERANCE

    assert engine.stats()["engine/computed_tokens"] == 700 + 30 + 530 + 3 * 3
    assert engine.stats()["engine/steps"] >= (1260 / 16 if prefill_tokens == 16 else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("opening", [COPIED, REFERRED], ids=["copied", "referred"])
def test_turns_of_sessions(name, opening, random_model, difference):
    """Four conversations of four turns over one opening; each turn extends what was said."""
    one = random_model(name)
    engine = TorchEngine(one.model)
    checked = []

    async def converse(index: int) -> None:
        context = [*opening, *prompt_of(index, index)]
        for turn in range(4):
            params = params_of(10 * index + turn, max_new_tokens=5 + index)
            found = await engine.generate(context, params, session=f"s{index}", deadline_s=300)
            checked.append((context, params, found))
            context = [*context, *found.ids, *prompt_of(3 + 7 * (index + turn) % 11, turn)]
        await engine.release(f"s{index}")

    async def all_of_them() -> None:
        await asyncio.gather(*(converse(index) for index in range(4)))

    asyncio.run(all_of_them())
    assert len(checked) == 16
    for context, params, found in checked:
        assert difference(one.logits(context + found.ids), context, found, params) < TOLERANCE

    assert engine.stats()["engine/session_hit_tokens"] > 12 * len(opening)


@pytest.mark.slow
def test_the_comparison_would_notice_a_wrong_window(random_model, difference, complete):
    """The models are not so flat that 1e-4 says nothing: the last token's log-probs move by much
    more when one far token changes."""
    for name in ARCHITECTURES:
        one = random_model(name)
        ids = prompt_of(20, 6)
        changed = [(ids[0] + 1) % 97, *ids[1:]]
        assert (
            one.logits(ids)[-1].log_softmax(-1) - one.logits(changed)[-1].log_softmax(-1)
        ).abs().max() > 0.01
