"""Effective sample sizes by the age of tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from aged_attempts import NOW, STILL, attempts, places
from by_name import effective_share
from hypothesis import given
from hypothesis import strategies as st

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.training.batching.staleness import (
    age_sums,
    effective_sizes,
)
from agentevo.training.trainer import Trainer
from agentevo.types import Sample


def expected_sizes(samples, weigh) -> dict[str, float]:
    """ESS by age, over all trained tokens of these samples. weigh: sample, its how-manieth trained
    token, behaviour log-prob -> weight."""
    of_age: dict[int, list[float]] = {}
    for sample in samples:
        for count, place in enumerate(places(sample)):
            of_age.setdefault(NOW - sample.versions[place], []).append(
                weigh(sample, count, sample.logprobs[place])
            )

    found = {}
    for age, weights in of_age.items():
        table = torch.tensor([weights], dtype=torch.float64)
        found[f"actor/ess_age_{age}"] = effective_share(table, torch.ones_like(table))

    return found


@pytest.mark.parametrize("micro_batch_tokens", [16384, 64])
@pytest.mark.parametrize("importance", ["none", "token_tis", "token_mis"])
def test_effective_sample_sizes_by_age(importance, micro_batch_tokens, random_model):
    """The weights of the loss where it has some, else the ratios; the trainer's log-probs are those
    of the recomputation."""
    section = AlgorithmSection(old_logprobs="recomputed", importance=importance, importance_cap=1.3)
    trainer = Trainer(
        copy.deepcopy(random_model("llama").model),
        STILL.model_copy(update={"micro_batch_tokens": micro_batch_tokens}),
        section,
    )
    samples = trainer.prepare(attempts(), version=NOW, bound=2).samples

    def weigh(sample: Sample, count: int, behaviour: float) -> float:
        ratio = (
            torch.tensor(sample.columns["old_logp"][count] - behaviour, dtype=torch.float64)
            .exp()
            .item()
        )
        if importance == "none":
            return ratio
        return min(ratio, 1.3) if importance == "token_tis" else ratio * (ratio <= 1.3)

    expected = expected_sizes(samples, weigh)
    metrics = trainer.step(samples)
    assert {key: value for key, value in metrics.items() if "ess_age" in key} == pytest.approx(
        expected, rel=1e-4
    )
    assert set(expected) == {"actor/ess_age_0", "actor/ess_age_1", "actor/ess_age_2"}
    assert len({round(value, 3) for value in expected.values()}) > 1, "else ages could be mixed up"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "decoupled"])
def test_later_optimizer_steps_do_not_blur_them(name, random_model):
    """The policy moves by itself between a step's optimizer steps; only the first one knows how
    off-policy the tokens were."""
    section = {
        "grpo": AlgorithmSection(),
        "decoupled": AlgorithmSection(policy_loss="decoupled_ppo"),
    }[name]
    fast = TrainerSection(learning_rate=0.05, warmup_steps=0, minibatches=2, epochs=2)
    trainer = Trainer(copy.deepcopy(random_model("llama").model), fast, section)
    made = trainer.prepare(attempts(), version=NOW, bound=3)
    first = [sample for sample in made.samples if sample.group_id == "g0"]
    alone = Trainer(copy.deepcopy(random_model("llama").model), STILL, section)
    alone.begin()
    expected = {key: value for key, value in alone.step(first).items() if "ess_age" in key}
    assert {
        key: value for key, value in trainer.step(made.samples).items() if "ess_age" in key
    } == pytest.approx(expected, rel=1e-5)
    assert expected


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.just(0.0) | st.floats(1e-9, 20)), min_size=1, max_size=30
    ),
    st.integers(0, 30),
)
def test_sums_by_age_add_up_over_parts(tokens, cut):
    ages, weights = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    parts = [age_sums(weights[part], ages[part]) for part in (slice(0, cut), slice(cut, None))]
    sums = {"other": 1.0}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums.get(key, 0.0) + value

    found = effective_sizes(sums)
    assert sums == {"other": 1.0}

    expected = {}
    for age in {int(a) for a in ages}:
        of_age = weights[ages == age][None]
        expected[f"actor/ess_age_{age}"] = effective_share(of_age, torch.ones_like(of_age))

    assert found == pytest.approx(expected, rel=1e-9)
