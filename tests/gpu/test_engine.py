"""The embedded engine on a GPU: log-probs of a full forward pass, and those that training finds."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from sampled_distribution import distribution_of

from agentevo.config import EngineSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample, SamplingParams


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


PROMPTS = [
    *[prompt_of(40, 1)] * 3,
    *[[*prompt_of(150, 2), *prompt_of(n, n)] for n in (1, 30, 64, 64)],
    prompt_of(1, 3),
    prompt_of(33, 5),
]
KINDS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02),
]


def complete(engine, params):
    async def together():
        return await asyncio.gather(
            *(
                engine.generate(prompt, param, deadline_s=120)
                for prompt, param in zip(PROMPTS, params, strict=True)
            )
        )

    return asyncio.run(together())


def params_of(count):
    return [
        SamplingParams(
            temperature=kind.temperature,
            top_p=kind.top_p,
            top_k=kind.top_k,
            min_p=kind.min_p,
            max_new_tokens=12,
            seed=index,
        )
        for index, kind in enumerate((KINDS * count)[:count])
    ]


@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_log_probs_are_those_of_a_full_pass(name, sharing, random_model, on_gpu):
    one = random_model(name)
    engine = TorchEngine(on_gpu(name), config=EngineSection(prefix_sharing=sharing))
    params = params_of(len(PROMPTS))
    for prompt, wanted, found in zip(PROMPTS, params, complete(engine, params), strict=True):
        rows = one.logits(prompt + found.ids)[len(prompt) - 1 : -1].double().numpy()
        if wanted.temperature == 0:
            assert np.abs(found.logprobs).max() < 1e-4
            continue

        expected = [
            np.log(distribution_of(row, wanted)[token])
            for row, token in zip(rows, found.ids, strict=True)
        ]
        assert np.abs(np.array(expected) - found.logprobs).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_training_finds_the_engines_log_probs(dtype, on_gpu, gpu):
    model = on_gpu("qwen3", dtype)
    params = [SamplingParams(temperature=1.0, max_new_tokens=12, seed=k) for k in range(9)]
    found = complete(TorchEngine(model, config=EngineSection()), params)
    samples = [
        Sample(
            trajectory_id=str(index),
            group_id="g",
            ids=prompt + one.ids,
            loss_mask=[False] * len(prompt) + [True] * len(one.ids),
            logprobs=[0.0] * len(prompt) + one.logprobs,
            versions=[-1] * len(prompt) + one.versions,
            advantages=[0.0] * len(one.ids),
        )
        for index, (prompt, one) in enumerate(zip(PROMPTS, found, strict=True))
    ]
    batch = pack(samples, gpu)
    with torch.no_grad():
        logp = batch.table(token_logprobs(model, batch)[0].float())

    difference = (logp - batch.rollout_logprobs)[batch.mask].abs()
    assert difference.max() < (1e-4 if dtype == torch.float32 else 0.3)
    assert difference.mean() < (1e-4 if dtype == torch.float32 else 0.05)


def test_new_weights_serve(on_gpu):
    model = on_gpu("llama")
    other = on_gpu("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)

    engine = TorchEngine(model, config=EngineSection())
    weights = {name: p.detach().clone() for name, p in other.named_parameters()}
    params = [SamplingParams(temperature=1.0, max_new_tokens=6, seed=k) for k in range(9)]
    before = complete(engine, params)
    asyncio.run(engine.publish(1, weights))
    after = complete(engine, params)
    wanted = complete(TorchEngine(other, config=EngineSection()), params)
    assert [one.ids for one in after] == [one.ids for one in wanted]
    assert [one.logprobs for one in after] != [one.logprobs for one in before]
