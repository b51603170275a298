"""Pointing a model at AgentEvo's attention."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agentevo.errors import ModelError
from agentevo.models.compute.attention import prepare


class Everyone:
    """A plan by which every token sees itself and all before it."""

    def attend(self, q, k, v, scaling, window, softcap, sinks=None):
        repeat = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)

        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)

        place = torch.arange(len(q))
        hidden = place[None, :] > place[:, None]
        if window is not None:
            hidden |= place[None, :] <= place[:, None] - window

        return torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v
        )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_a_plan_gets_what_attention_needs(name, random_model):
    """Scaling, window and cap of every layer reach the plan: a plain causal one gives what
    transformers gives."""
    one = random_model(name)
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        ours = one.model(
            input_ids=ids, position_ids=torch.arange(60)[None], use_cache=False, plan=Everyone()
        ).logits[0]
    torch.testing.assert_close(ours, one.logits(ids[0].tolist()), rtol=1e-4, atol=1e-4)


def test_a_prepared_model_without_a_plan_says_what_to_do(random_model):
    with pytest.raises(
        ModelError, match=r"call it with plan=\.\.\., or model\.set_attn_implementation\('sdpa'\)"
    ):
        random_model("llama").model(input_ids=torch.tensor([[5, 6]]))


def test_a_prepared_model_can_go_back(random_model):
    one = random_model("llama")
    model = copy.deepcopy(one.model)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=torch.tensor([[5, 6, 7]])).logits[0],
            one.logits([5, 6, 7]),
            rtol=1e-4,
            atol=1e-4,
        )


def test_parameters_stay_the_same_objects(random_model):
    model = copy.deepcopy(random_model("qwen2").alone)
    before = dict(model.named_parameters())
    prepare(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_what_is_not_supported_is_refused(random_model):
    class OldModel(GPT2LMHeadModel):
        _supports_attention_backend = False

    with pytest.raises(ModelError, match="OldModel does not use transformers' attention interface"):
        prepare(OldModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11)), compute="tree")
