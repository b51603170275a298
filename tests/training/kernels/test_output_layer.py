"""Predictions without logits: what they are for any architecture, inside of adapters, and when the
logits are computed after all."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from slow import slow
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from agentevo.models.compute.attention import prepare
from agentevo.training.batching.packing import pack
from agentevo.training.kernels import output_layer
from agentevo.training.kernels.logprobs import selected_logprobs
from agentevo.training.kernels.output_layer import (
    OutputListener,
    OutputTail,
    all_logits,
    last_hidden,
    linear_output,
    tail_of,
    token_logprobs,
    token_logprobs_and_squares,
)

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def made(name, random_model):
    """A prepared model of the fixture, or of an architecture that scales its logits its own way;
    `-untied` and `-tied` say whether the output layer is the embedding."""
    name, _, tie = name.partition("-")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "cohere":
            return prepare(CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.3)).eval())
        if name == "granite":
            return prepare(GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)).eval())

        if name == "hyperclovax":
            return prepare(
                HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SHAPE, logits_scaling=0.4)).eval()
            )

        if name == "mixtral":
            return prepare(MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).eval())

        model = copy.deepcopy(random_model(name).model)
        if tie:
            model.config.tie_word_embeddings = tie == "tied"
            kind = {"llama": LlamaForCausalLM, "gemma2": Gemma2ForCausalLM}.get(name, type(model))
            model = prepare(kind(model.config).eval())
            assert (model.lm_head.weight is model.get_input_embeddings().weight) == (tie == "tied")

        return model


@pytest.fixture
def batch(samples_of):
    rng = random.Random(4)
    prompt = [rng.randrange(2, 97) for _ in range(30)]
    ends = [[rng.randrange(2, 97) for _ in range(rng.randrange(2, 15))] for _ in range(6)]
    return pack(samples_of([[*prompt, *end] for end in ends], temperature=0.8), CPU)


def with_gradients(model, batch, compute, gradient):
    """Log-probs, entropies, and the gradient in all weights of what the trainer would ask."""
    model.zero_grad(set_to_none=True)
    logp, entropy = compute(model)
    generator = torch.Generator().manual_seed(1)
    loss = (torch.randn(len(logp), generator=generator) * logp).sum() + 0.3 * (
        torch.rand(len(entropy), generator=generator) * entropy
    ).sum()
    loss.backward()
    return logp.detach(), entropy.detach(), gradient(model)


NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "mistral",
    "cohere",
    "granite",
    "hyperclovax",
    "mixtral",
    "llama-untied",
    "qwen3-tied",
    "gemma2-untied",
    "mistral-tied",
]


def through_logits(model, batch):
    """What `token_logprobs` gives, with all logits computed."""
    return selected_logprobs(all_logits(model, batch), batch.rows, batch.targets, batch.temperature)


@pytest.mark.parametrize("lora", [False, *slow(True)])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_through_logits(name, lora, random_model, batch, gradient):
    model = made(name, random_model)
    if lora:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = get_peft_model(
                model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            )

    assert linear_output(model, batch) is not None

    through = with_gradients(model, batch, lambda one: through_logits(one, batch), gradient)
    without = with_gradients(model, batch, lambda one: token_logprobs(one, batch), gradient)
    for ours, theirs in zip(without[:2], through[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    assert float((without[2] - through[2]).norm() / through[2].norm()) < 1e-5


def test_no_logits_are_computed(random_model, batch):
    model = copy.deepcopy(random_model("llama").model)
    seen = []
    layer = model.get_output_embeddings()
    original = type(layer).forward

    def watched(self, given):
        if self is layer:
            seen.append(given.shape)
        return original(self, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "forward", watched)
        token_logprobs(model, batch)
        last_hidden(model, batch)
        with torch.no_grad():
            token_logprobs_and_squares(model, batch)

    assert seen == [torch.Size([1, 0, 32])] * 3
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_a_failing_pass_leaves_no_hook(random_model, batch):
    model = copy.deepcopy(random_model("llama").model)
    batch.input_ids = batch.input_ids + 1000
    with pytest.raises(IndexError):
        token_logprobs(model, batch)
    layer = model.get_output_embeddings()
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_hidden_states_and_who_listens_to_them(random_model, batch):
    one = copy.deepcopy(random_model("gemma2"))
    with OutputListener(one.model, batch) as heard:
        token_logprobs(one.model, batch)
    with OutputListener(one.model, batch) as through:
        all_logits(one.model, batch)
    assert heard.hidden.shape == (len(batch.logit_nodes), 32)
    torch.testing.assert_close(heard.hidden, through.hidden)
    torch.testing.assert_close(last_hidden(one.model, batch), through.hidden)
    assert heard.hidden.requires_grad


def test_squares_of_probabilities(random_model, batch):
    model = random_model("gemma2").model
    with torch.no_grad():
        logp, squares = token_logprobs_and_squares(model, batch)
        torch.testing.assert_close(logp, through_logits(model, batch)[0], rtol=1e-5, atol=1e-5)
        probs = torch.softmax(all_logits(model, batch) / batch.temperature, -1)
        torch.testing.assert_close(squares, probs.square().sum(-1), rtol=1e-5, atol=1e-5)


def test_an_update_is_seen_by_the_next_pass(random_model, batch):
    """The output layer's packed copy of its weight goes with every pass that has gradients."""
    model = copy.deepcopy(random_model("qwen2").model)
    with torch.no_grad():
        before = all_logits(model, batch)

    token_logprobs(model, batch)[0].sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()

    alone = copy.deepcopy(model)
    with torch.no_grad():
        after = all_logits(model, batch)
        torch.testing.assert_close(after, all_logits(alone, batch))

    assert float((after - before).abs().max()) > 0.1


def adapted(model):
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )


def hooked(model):
    model.get_output_embeddings().register_forward_hook(lambda layer, given, made: 2 * made)
    return model


def muted(model):
    """Forbids a token."""
    original = model.forward

    def forward(*args, **kwargs):
        found = original(*args, **kwargs)
        found.logits = found.logits.index_fill(-1, torch.tensor([50]), -100.0)
        return found

    model.forward = forward
    return model


@pytest.mark.parametrize("change", [adapted, hooked, muted])
def test_whatever_is_unusual_goes_through_the_logits(change, random_model, batch):
    model = change(made("qwen2", random_model))
    assert linear_output(model, batch) is None
    torch.testing.assert_close(token_logprobs(model, batch), through_logits(model, batch))
    assert last_hidden(model, batch).shape == (len(batch.logit_nodes), 32)


PROBES = [0.5, -1.0, 3.0, -12.0, 0.0, 40.0, 1e30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, 7.3, -2.0])
def test_scale_and_cap_are_found_by_asking(scale, softcap, dtype):
    probes = torch.tensor(PROBES * 3, dtype=torch.float64)[:-2]
    made = (
        (probes.to(dtype) * scale).double()
        if softcap is None
        else (softcap * torch.tanh(probes.to(dtype) * scale / softcap)).double()
    )
    found = tail_of(probes, made.view(1, 1, -1).to(dtype))
    if softcap is not None and scale < 0:
        assert found is None, "no model has that, and a cap at -softcap is not looked for"
        return

    assert found is not None
    assert found.logit_scale == pytest.approx(scale, rel=1e-4)
    assert found.softcap == (None if softcap is None else pytest.approx(softcap))


@pytest.mark.parametrize(
    "tail",
    [
        lambda x: x + 1,
        torch.relu,
        lambda x: x.clamp(-20, 20),
        lambda x: x.square(),
        lambda x: x[..., :-1],
        lambda x: x.log_softmax(-1),
    ],
)
def test_other_tails_are_not_mistaken(tail):
    probes = torch.tensor(PROBES * 2, dtype=torch.float64)
    assert tail_of(probes, tail(probes.view(1, 1, -1))) is None


def test_plain_logits_have_no_tail():
    probes = torch.tensor(PROBES, dtype=torch.float64)
    assert tail_of(probes, probes.view(1, 1, -1)) == OutputTail(None, 1.0)


def counting(monkeypatch):
    """How often the model was asked for its tail."""
    asked = []
    real = output_layer.tail_of
    monkeypatch.setattr(output_layer, "tail_of", lambda *given: asked.append(1) or real(*given))
    return asked


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "hyperclovax"])
def test_a_model_is_asked_once(name, random_model, batch, monkeypatch):
    model = copy.deepcopy(made(name, random_model))
    asked = counting(monkeypatch)
    first = token_logprobs(model, batch)

    with torch.no_grad():
        again = token_logprobs(model, batch)

    model.train()
    token_logprobs(model, batch)
    assert len(asked) == 1

    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-5, atol=1e-5)

    token_logprobs(copy.deepcopy(model), batch)
    assert len(asked) == 2, "a copy may have other settings"


@pytest.mark.slow
def test_a_model_is_asked_again_when_its_settings_have_changed(random_model, batch):
    model = copy.deepcopy(random_model("gemma2").model)
    for change in (
        lambda: None,
        lambda: setattr(model.config, "final_logit_softcapping", 3.0),
        lambda: None,
    ):
        change()
        ours = token_logprobs(model, batch)
        theirs = through_logits(model, batch)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)

    handle = model.register_forward_hook(
        lambda module, given, found: setattr(found, "logits", 2 * found.logits) or found
    )
    torch.testing.assert_close(
        token_logprobs(model, batch)[0], through_logits(model, batch)[0], rtol=1e-5, atol=1e-5
    )
    handle.remove()
    torch.testing.assert_close(token_logprobs(model, batch)[0], ours[0])

    scaled = made("cohere", random_model)
    before = token_logprobs(scaled, batch)[0]
    scaled.logit_scale = 0.9
    assert not torch.allclose(token_logprobs(scaled, batch)[0], before)

    torch.testing.assert_close(
        token_logprobs(scaled, batch)[0], through_logits(scaled, batch)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_a_forgotten_model_is_forgotten(random_model, batch):
    model = copy.deepcopy(random_model("llama").model)
    token_logprobs(model, batch)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
