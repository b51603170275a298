"""Packing changes the cost of a batch and nothing else: log-probs, loss and gradients are those of
one sequence at a time."""

from __future__ import annotations

import copy
import random

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import slow, soak

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.trainer import Trainer
from examples import examples

ARCHITECTURES = ["llama", "gemma2", *slow("mistral"), *soak("qwen2", "qwen3")]
WHOLE_GRADIENT = TrainerSection(max_grad_norm=1e9, learning_rate=1e-6)


def words(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


def branching(seed: int) -> list[list[int]]:
    """A long prompt with a group of answers, answers that branch again at any depth, a duplicate,
    one that stands alone."""
    root = words(45, seed)
    other = words(9, seed + 1)
    first = [*root, *words(12, seed + 2)]
    return [
        first,
        [*root, *words(3, seed + 3)],
        [*root, *words(30, seed + 4)],
        [*first[:50], *words(6, seed + 5)],
        [*first, *words(4, seed + 6)],
        first,
        root[:20],
        [*root[:21], *words(30, seed + 7)],
        other,
        [*other, *words(1, seed + 8)],
        words(60, seed + 9),
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_entropies(name, temperature, random_model, samples_of):
    one = random_model(name)
    samples = samples_of(branching(1), temperature=temperature)
    batch = pack(samples, torch.device("cpu"))
    assert batch.num_distinct < 0.6 * batch.num_logical

    with torch.no_grad():
        found, entropy = token_logprobs(one.model, batch)

    expected = []
    expected_entropy = []
    for sample in samples:
        rows = torch.log_softmax(one.logits(sample.ids) / temperature, -1)
        places = [place for place, trained in enumerate(sample.loss_mask) if trained]
        expected += [float(rows[place - 1, sample.ids[place]]) for place in places]
        expected_entropy += [
            float(-(rows[place - 1].exp() * rows[place - 1]).sum()) for place in places
        ]

    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(
        entropy[batch.rows], torch.tensor(expected_entropy), rtol=1e-5, atol=2e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("llama", "seq-mean-token-sum"),
        ("gemma2", "token-mean"),
        ("mistral", "seq-mean-token-mean"),
        pytest.param("llama", "token-mean", marks=pytest.mark.soak),
        pytest.param("llama", "seq-mean-token-mean", marks=pytest.mark.soak),
        pytest.param("qwen2", "seq-mean-token-sum", marks=pytest.mark.soak),
        pytest.param("qwen3", "token-mean", marks=pytest.mark.soak),
    ],
)
def test_loss_and_gradients_of_the_whole_objective(
    name, aggregation, random_model, samples_of, slow_loss, gradient, referred
):
    """Clipped surrogate, KL to a reference and entropy bonus, through the trainer; relative to the
    size of the gradient."""
    one = copy.deepcopy(random_model(name))
    section = AlgorithmSection(
        aggregation=aggregation, kl_coef=0.3, entropy_coef=0.05, clip_high=0.28
    )
    samples = samples_of(branching(2), seed=2, temperature=0.9)
    samples = [
        msgspec.structs.replace(s, logprobs=[-4.0 if m else 0.0 for m in s.loss_mask])
        for s in samples
    ]
    trainer = Trainer(one.model, WHOLE_GRADIENT, section)
    trainer.begin()
    other = copy.deepcopy(one.alone)

    with torch.no_grad():  # the policy moves away from its reference
        for ours, theirs in zip(one.model.parameters(), one.alone.parameters(), strict=True):
            ours.mul_(1.05)
            theirs.mul_(1.05)

    expected = slow_loss(one.alone, samples, section, other)
    expected.backward()
    expected = float(expected.detach())
    metrics = trainer.step(referred(trainer, samples))
    wanted = gradient(one.alone)
    found = gradient(one.model)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert metrics["actor/grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)

    if (
        aggregation == "token-mean"
    ):  # of the KL and the entropy the metrics hold the mean over tokens
        total = (
            metrics["actor/pg_loss"]
            + 0.3 * metrics["actor/kl_loss"]
            - 0.05 * metrics["actor/entropy"]
        )
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_branches_at_any_depth(name, random_model, samples_of, slow_loss, gradient):
    """Random tries over two letters share and branch everywhere; a window of 24 tokens is passed by
    the longest."""
    one = copy.deepcopy(random_model(name))
    section = AlgorithmSection()
    trainer = Trainer(
        one.model, WHOLE_GRADIENT.model_copy(update={"learning_rate": 1e-12}), section
    )
    letters = st.lists(st.sampled_from([5, 6]), min_size=1, max_size=6)
    stem = words(26, 3)

    @settings(max_examples=examples(12), deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, 26), letters), min_size=1, max_size=7))
    @example([(26, [5]), (26, [5, 6]), (25, [5]), (26, [5])])
    def any_trie(branches):
        samples = samples_of(
            [[7, *stem[:depth], *end] for depth, end in branches], seed=len(branches)
        )
        one.alone.zero_grad()
        slow_loss(one.alone, samples, section).backward()
        trainer.step(samples)
        wanted = gradient(one.alone)
        assert float((gradient(one.model) - wanted).norm()) < 1e-5 * float(wanted.norm()) + 1e-9

    any_trie()


def test_what_can_not_be_packed_is_refused(samples_of):
    one, other = samples_of([[3, 4, 5], [3, 4, 6]])
    with pytest.raises(ValueError, match="one temperature"):
        pack([one, msgspec.structs.replace(other, temperature=0.5)], torch.device("cpu"))
    with pytest.raises(ValueError, match="sample of t0: its first token is marked as trained"):
        pack([msgspec.structs.replace(one, loss_mask=[True, True, True])], torch.device("cpu"))
