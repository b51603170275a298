"""Rotary frequencies that depend on the longest sequence of a pass: exact up to the border, refused
beyond it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from agentevo.errors import ModelError, RequestTooLongError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.positions import context_length, length_advice
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample, SamplingParams

BORDER = 24
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {
    **DEFAULT,
    "rope_type": "longrope",
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
DYNAMIC = {**DEFAULT, "rope_type": "dynamic", "factor": 4.0}


def phi3(rope) -> Phi3ForCausalLM:
    torch.manual_seed(0)
    config = Phi3Config(
        **SHAPE, original_max_position_embeddings=BORDER, rope_parameters=dict(rope)
    )
    return Phi3ForCausalLM(config).eval()


def llama(rope) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dict(rope))).eval()


def gemma3(rope) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    ropes = {"sliding_attention": dict(DEFAULT), "full_attention": dict(rope)}
    config = Gemma3TextConfig(**SHAPE, layer_types=layers, sliding_window=8, rope_parameters=ropes)
    return Gemma3ForCausalLM(config).eval()


MODELS = [(phi3, LONGROPE, BORDER), (llama, DYNAMIC, 96), (gemma3, LONGROPE, BORDER)]


def logprobs(model, *sequences):
    """Of all tokens of sequences in one pass, but the first ones."""
    samples = [
        Sample.given(str(n), "", ids, [False] + [True] * (len(ids) - 1))
        for n, ids in enumerate(sequences)
    ]
    with torch.no_grad():
        return token_logprobs(model, pack(samples, torch.device("cpu")))[0]


@pytest.mark.parametrize(("make", "rope", "border"), MODELS)
def test_no_sequence_changes_the_frequencies_of_another(make, rope, border):
    alone = make(rope)
    model = prepare(copy.deepcopy(alone))
    assert context_length(model.config) == border

    short = list(range(5, 17))
    longest = [5 + n % 90 for n in range(border)]
    wanted = torch.cat(
        [
            alone(input_ids=torch.tensor([ids]), use_cache=False)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            for ids in (short, longest[::-1])
        ]
    )
    found = logprobs(model, short, longest[::-1])
    torch.testing.assert_close(found.sort().values, wanted.sort().values, rtol=0, atol=2e-5)

    with pytest.raises(ModelError, match=f"has {border + 1} tokens, but beyond {border}"):
        logprobs(model, short, [*longest, 7])


@pytest.mark.parametrize(("make", "rope", "border"), MODELS)
def test_the_engine_takes_no_request_across_the_border(make, rope, border):
    engine = TorchEngine(prepare(make(rope)))
    prompt = [5 + n % 90 for n in range(border - 4)]

    async def ask(max_new_tokens: int):
        sampling = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=1)
        return await engine.generate(prompt, sampling, deadline_s=300)

    assert len(asyncio.run(ask(4)).ids) == 4
    with pytest.raises(RequestTooLongError) as refusal:
        asyncio.run(ask(5))

    advice = length_advice(engine.model.config)
    assert advice in str(refusal.value)
    assert ("copy long_factor over short_factor" in advice) == (rope is LONGROPE)


def test_one_set_of_frequencies_has_no_border():
    """What the advice leads to: the model's whole context, and numbers that depend on nothing."""
    model = prepare(phi3(LONGROPE | {"short_factor": LONGROPE["long_factor"]}))
    assert context_length(model.config) == 96 and length_advice(model.config) == ""

    short = list(range(5, 17))
    longest = [5 + n % 90 for n in range(96)]
    together = logprobs(model, short, longest)
    assert len(together) == 11 + 95
    apart = torch.cat([logprobs(model, short), logprobs(model, longest)])
    torch.testing.assert_close(together.sort().values, apart.sort().values, rtol=0, atol=2e-5)
