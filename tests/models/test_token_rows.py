"""Ids of a model that are no tokens, and tokens that are banned, are never drawn, and have no
probability in training."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from constrained import END, FACT, complete, params, tiny_policy

from agentevo.config import ModelSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.save import save_model
from agentevo.models.token_rows import ban_tokens, num_token_rows, token_logits
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import allowed_logits, token_logprobs
from agentevo.training.supervised import held_out_metrics
from agentevo.types import Sample

UNUSED = 75
"""More rows than tokens: most draws of random weights would be one of them."""
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> LoadedModel:
    """A policy whose embeddings have rows that no token has, and likes these best."""
    loaded = tiny_policy()
    model = copy.deepcopy(loaded.model)
    rows = len(loaded.tokenizer) + UNUSED
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(loaded.tokenizer) :] *= 8
    model.set_attn_implementation("sdpa")
    folder = save_model(model, loaded.tokenizer, tmp_path_factory.mktemp("padded") / "model")
    read = load_model(ModelSection(name=str(folder), device="cpu"))
    assert read.model.config.vocab_size == rows and num_token_rows(read.model) == rows - UNUSED
    prepare(read.model)
    return read


@pytest.mark.slow
def test_what_is_drawn_is_a_token_and_the_trainer_computes_its_log_prob(padded):
    engine = TorchEngine(padded.model, padded.tokenizer)
    requests = [(PROMPT, params("", seed, max_new_tokens=32)) for seed in range(6)]
    requests += [(PROMPT, params(FACT, 7)), (PROMPT, params("", 8, temperature=0.0))]
    answers = complete(engine, requests)
    tokens = len(padded.tokenizer)
    assert max(token for answer in answers for token in answer.ids) < tokens

    for answer, (prompt, asked) in zip(answers[:6], requests[:6], strict=True):
        mask = [False] * len(prompt) + [True] * len(answer.ids)
        sample = Sample.given("t", "g", [*prompt, *answer.ids], mask, asked.temperature)
        batch = pack([sample], torch.device("cpu"))
        logits = token_logits(padded.model, padded.model(**batch.inputs).logits[0])
        exact = torch.log_softmax(logits.double(), -1)[batch.rows, batch.targets].float()
        trained, _ = token_logprobs(padded.model, batch)
        torch.testing.assert_close(torch.tensor(answer.logprobs), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(trained, exact, rtol=1e-5, atol=1e-5)
        whole = torch.log_softmax(allowed_logits(padded.model, batch), -1)
        torch.testing.assert_close(whole[batch.rows, batch.targets], exact, rtol=1e-5, atol=1e-5)

    scored = asyncio.run(engine.score(requests[0][0], list(answers[0].ids), deadline_s=300.0))
    assert scored.logprobs == pytest.approx(answers[0].logprobs, abs=1e-6)


def test_rows_of_no_token_get_no_gradient(padded):
    model = copy.deepcopy(padded.model)
    ids = [*PROMPT, 41, 42, END]
    mask = [False] * len(PROMPT) + [True] * 3
    batch = pack([Sample.given("t", "g", ids, mask, 1.0)], torch.device("cpu"))
    logp, entropy = token_logprobs(model, batch)
    (logp.sum() + entropy.sum()).backward()

    tied = model.get_output_embeddings().weight
    assert tied.grad is not None
    assert not bool(tied.grad[len(padded.tokenizer) :].any())
    assert bool(tied.grad[: len(padded.tokenizer)].any())


def test_a_prompt_with_an_id_that_is_no_token_is_refused(padded):
    engine = TorchEngine(padded.model, padded.tokenizer)
    tokens = len(padded.tokenizer)
    with pytest.raises(EngineError, match=f"knows 0 to {tokens - 1}"):
        complete(engine, [([*PROMPT, tokens], params(""))])


@pytest.mark.slow
def test_banned_tokens_are_never_drawn_and_the_trainer_computes_the_same_distribution(padded):
    model = copy.deepcopy(padded.model)
    favourites = [70, 71, 100, len(padded.tokenizer) - 1]
    with torch.no_grad():
        model.get_output_embeddings().weight[favourites] *= 40
    engine = TorchEngine(model, padded.tokenizer)
    ask = [(PROMPT, params("", 3, temperature=2.0, max_new_tokens=32))]
    assert set(complete(engine, ask)[0].ids) & set(favourites)

    ban_tokens(model, favourites[:3])
    ban_tokens(model, favourites[3:])
    for temperature in (0.0, 0.01, 2.0):
        ask = [(PROMPT, params("", 3, temperature=temperature, max_new_tokens=32))]
        answer = complete(engine, ask)[0]
        assert not set(answer.ids) & set(favourites)

    mask = [False] * len(PROMPT) + [True] * len(answer.ids)
    sample = Sample.given("t", "g", [*PROMPT, *answer.ids], mask, 2.0)
    batch = pack([sample], torch.device("cpu"))
    trained, entropy = token_logprobs(model, batch)
    torch.testing.assert_close(trained, torch.tensor(answer.logprobs), rtol=1e-5, atol=1e-5)
    whole = torch.log_softmax(allowed_logits(model, batch) / 2.0, -1)
    expected = whole[batch.rows, batch.targets]
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-5)
    entropies = -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(entropy, entropies, rtol=1e-4, atol=1e-4)

    held_out = held_out_metrics(model, [sample], 4096)
    assert held_out is not None
    assert held_out["sft/eval/loss"] == pytest.approx(-float(trained.detach().mean()), rel=1e-5)
    first_choices = (whole.argmax(-1)[batch.rows] == batch.targets).float().mean()
    assert held_out["sft/eval/token_accuracy"] == pytest.approx(float(first_choices))

    weight = model.get_output_embeddings().weight
    of_layer = torch.autograd.grad(trained.sum() + entropy.sum(), weight)[0]
    by_logits = torch.autograd.grad(expected.sum() + entropies.sum(), weight)[0]
    torch.testing.assert_close(of_layer, by_logits, rtol=1e-3, atol=1e-4)

    with pytest.raises(EngineError, match="never sampled"):
        asyncio.run(engine.score(PROMPT, [41, 71], deadline_s=300.0))
