"""Supervised training: what the assistant says is learned, and nothing else."""

from __future__ import annotations

import copy
import math
import random
import re
from functools import partial

import pytest
import torch

from agentevo.config import ColdStartSection, SFTSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.supervised import (
    SupervisedTrainer,
    conversation_sample,
    held_out_metrics,
    plan_batches,
    scheduled_rate,
    train_supervised,
)
from agentevo.types import Message, Sample

TALK = [
    Message("system", "Go on."),
    Message("user", "Take the left coin or the right one."),
    Message("assistant", "left"),
    Message("user", "You win. Go on."),
    Message("assistant", "Up Down"),
]
OTHER = [Message("user", "Go on."), Message("assistant", "right")]


def no_progress(done: int, total: int, loss: float) -> None:
    pass


def train(
    loaded, samples, section: ColdStartSection, trainer: TrainerSection | None = None, **options
):
    options = {"seed": 0, "progress": no_progress} | options
    make = partial(SupervisedTrainer, loaded.model, key="cold_start")
    return train_supervised(samples, section, trainer or TrainerSection(), make=make, **options)


def test_only_the_assistants_tokens_are_trained(loaded, chat):
    sample = conversation_sample(TALK, chat, "demo")
    runs = re.findall("1+", "".join("1" if m else "0" for m in sample.loss_mask))
    trained = [token for token, m in zip(sample.ids, sample.loss_mask, strict=True) if m]

    assert len(runs) == 2
    assert loaded.tokenizer.decode(trained) == "left<|end|>Up Down<|end|>"

    whole = (
        "<|system|>Go on.<|end|><|user|>Take the left coin or the right "
        "one.<|end|><|assistant|>left<|end|>"
    )
    assert (
        loaded.tokenizer.decode(sample.ids)
        == f"{whole}<|user|>You win. Go on.<|end|><|assistant|>Up Down<|end|>"
    )
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)
    assert len(sample.advantages) == sample.num_trained


def test_a_sample_is_what_the_policy_would_have_seen(chat):
    """The same ids as an episode in which the policy says these words."""
    sample = conversation_sample(TALK, chat, "demo")
    ids = [
        *chat.first_prompt(TALK[:2]),
        *chat.completion(Message("assistant", "left")),
        *chat.continuation([TALK[3]], ended_with_stop=True),
        *chat.completion(Message("assistant", "Up Down")),
    ]
    assert sample.ids.tolist() == ids


@pytest.mark.slow
def test_an_update_has_the_gradient_of_the_mean_loss_per_token(loaded, chat, gradient):
    """Against transformers' own attention, one conversation at a time; micro-batches don't change
    it."""
    alone = copy.deepcopy(loaded.model)
    alone.set_attn_implementation("eager")
    samples = [
        conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER, TALK[1:3]))
    ]
    losses = []
    for sample in samples:
        ids = torch.tensor([sample.ids])
        logp = torch.log_softmax(alone(input_ids=ids).logits[0], -1)
        losses += [
            -logp[place - 1, sample.ids[place]] for place, m in enumerate(sample.loss_mask) if m
        ]

    expected = torch.stack(losses).mean()
    expected.backward()
    for micro_batch_tokens in (16384, 64):
        model = copy.deepcopy(loaded.model)
        section = TrainerSection(max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
        (found,) = train_supervised(
            samples,
            ColdStartSection(batch_episodes=3),
            section,
            make=partial(SupervisedTrainer, model, key="cold_start"),
            seed=0,
            progress=no_progress,
        )
        assert found == pytest.approx(float(expected), rel=1e-5)
        assert float((gradient(model) - gradient(alone)).norm() / gradient(alone).norm()) < 1e-5


@pytest.mark.slow
def test_what_is_demonstrated_is_learned(loaded, chat):
    samples = [conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER))]
    losses = train(
        loaded, samples, ColdStartSection(epochs=60, batch_episodes=2, learning_rate=3e-3)
    )
    assert len(losses) == 60
    assert losses[0] > 3.0
    assert losses[-1] < 0.1


@pytest.mark.slow
def test_epochs_batches_and_progress(loaded, chat):
    samples = [conversation_sample(OTHER, chat, str(n)) for n in range(5)]
    seen = []
    losses = train(
        loaded,
        samples,
        ColdStartSection(epochs=2, batch_episodes=2),
        progress=lambda *told: seen.append(told),
    )

    assert [(done, total) for done, total, _ in seen] == [(n, 6) for n in range(1, 7)]
    assert [loss for *_, loss in seen] == losses


class Scripted:
    """A trainer with these losses."""

    def __init__(self, losses):
        self.losses = iter(losses)

    def step(self, samples):
        return {"sft/loss": next(self.losses)}


def train_scripted(chat, losses, **section):
    """The losses of a cold start of three equal episodes, two a step, and its warnings."""
    warnings = []
    made = train_supervised(
        [conversation_sample(OTHER, chat, str(n)) for n in range(3)],
        ColdStartSection(batch_episodes=2, **section),
        TrainerSection(),
        make=lambda settings, steps: Scripted(losses),
        seed=0,
        progress=no_progress,
        warn=warnings.append,
    )
    return made, warnings


def test_training_ends_after_the_first_pass_whose_mean_loss_is_low_enough(chat):
    losses = [2.0, 0.9, 1.0, 2.1, 1.0, 1.0]
    made, warnings = train_scripted(chat, losses, epochs=9, until_loss=1.5)

    assert made == losses[:4], "the mean of a pass over its tokens, not its last loss"
    assert not warnings


def test_a_loss_that_no_pass_reaches_is_a_warning(chat):
    losses = [3.0, 1.0, 2.0, 2.0]
    made, warnings = train_scripted(chat, losses, epochs=2, until_loss=1.5)
    assert made == losses
    assert ["2.000 nats per token, above cold_start.until_loss=1.5" in text for text in warnings]
    assert len(warnings) == 1

    assert train_scripted(chat, [0.0] * 4, epochs=2) == ([0.0] * 4, []), "no such loss is set"


def test_samples_of_one_episode_stay_in_one_batch(loaded, chat):
    """An agent without memory has a conversation for every turn; `batch_episodes` counts episodes
    all the same."""
    samples = [conversation_sample(OTHER, chat, f"episode-{n // 3}") for n in range(12)]
    assert len(train(loaded, samples, ColdStartSection(batch_episodes=2))) == 2


@pytest.mark.slow
def test_order_follows_the_seed(tiny_policy, chat):
    samples = [
        conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER, TALK[:3]))
    ]
    section = ColdStartSection(epochs=2, batch_episodes=1)
    same, again, other = (
        train(tiny_policy(seed=3), samples, section, seed=seed) for seed in (1, 1, 2)
    )
    assert same == again
    assert same != other


def test_a_stop_is_heeded_before_the_next_batch(loaded, chat):
    samples = [conversation_sample(OTHER, chat, str(n)) for n in range(8)]
    seen: list[int] = []
    losses = train(
        loaded,
        samples,
        ColdStartSection(batch_episodes=1),
        progress=lambda done, total, loss: seen.append(done),
        stop=lambda: len(seen) == 3,
    )
    assert len(losses) == 3


def test_a_loss_that_is_not_finite_changes_nothing(loaded, chat):
    with torch.no_grad():
        loaded.model.model.norm.weight[0] = float("nan")
    before = copy.deepcopy(loaded.model.state_dict())
    with pytest.raises(TrainingError, match=r"lower cold_start\.learning_rate"):
        train(loaded, [conversation_sample(OTHER, chat, "a")], ColdStartSection())
    after = loaded.model.state_dict()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def _mixed_samples(num: int = 7):
    """Samples of mixed length, of which some begin alike and one is there twice."""
    rng = random.Random(3)
    stem = [rng.randrange(90) for _ in range(20)]
    ids = [
        stem[: rng.randrange(5, 20)] + [rng.randrange(90) for _ in range(rng.randrange(3, 40))]
        for _ in range(num - 1)
    ]
    ids.append(ids[0])
    return [
        Sample.given(str(n), "", row, [False, *(rng.random() < 0.4 for _ in row[2:]), True])
        for n, row in enumerate(ids)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_batch_tokens", "merge"), [(64, True), (16384, True), (16384, False)]
)
def test_packing_equals_one_at_a_time(loaded, gradient, micro_batch_tokens, merge):
    """Loss, gradient, and the held-out loss and accuracy, against whole sequences through
    transformers' own attention."""
    samples = _mixed_samples()
    alone = copy.deepcopy(loaded.model)
    alone.set_attn_implementation("eager")
    losses = []
    right = []
    for sample in samples:
        logp = torch.log_softmax(alone(input_ids=torch.tensor([sample.ids])).logits[0], -1)
        places = [place for place, m in enumerate(sample.loss_mask) if m]
        losses += [-logp[place - 1, sample.ids[place]] for place in places]
        right += [int(logp[place - 1].argmax()) == sample.ids[place] for place in places]

    expected = torch.stack(losses).mean()
    expected.backward()
    found = held_out_metrics(loaded.model, samples, micro_batch_tokens)
    assert found["sft/eval/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["sft/eval/perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-4)
    assert found["sft/eval/token_accuracy"] == pytest.approx(sum(right) / len(right))

    section = SFTSection(
        max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens, prefix_merging=merge
    )
    metrics = SupervisedTrainer(loaded.model, section, total_steps=1).step(samples)
    assert metrics["sft/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["trainer/trained_tokens"] == len(losses)
    assert metrics["trainer/logical_tokens"] == sum(len(s.ids) for s in samples)
    assert (metrics["trainer/distinct_tokens"] < metrics["trainer/logical_tokens"]) == merge
    assert float((gradient(loaded.model) - gradient(alone)).norm() / gradient(alone).norm()) < 1e-5


def test_batches_by_tokens_and_by_conversations():
    sizes = {"a": 50, "b": 60, "c": 10, "d": 200, "e": 30}
    for section in (
        SFTSection(epochs=3, batch_tokens=100),
        SFTSection(epochs=3, batch_conversations=2),
    ):
        batches = plan_batches(sizes, section, seed=1)
        assert (
            batches == plan_batches(sizes, section, seed=1) != plan_batches(sizes, section, seed=2)
        )
        assert sorted(name for batch in batches for name in batch) == sorted([*sizes] * 3)

        if section.batch_tokens:
            assert all(
                sum(sizes[name] for name in batch) <= 100 or batch == ["d"] for batch in batches
            )
        else:
            assert [len(batch) for batch in batches] == [2, 2, 1] * 3


def test_the_learning_rate_over_the_steps():
    section = SFTSection(learning_rate=2.0, warmup_ratio=0.2, min_lr_ratio=0.1, schedule="linear")
    assert [round(scheduled_rate(section, step, 10), 6) for step in (0, 1, 2, 6)] == [
        1.0,
        2.0,
        2.0,
        1.1,
    ]
    cosine = section.model_copy(update={"schedule": "cosine", "min_lr_ratio": 0.0})
    assert scheduled_rate(cosine, 6, 10) == pytest.approx(1.0)
    assert scheduled_rate(section.model_copy(update={"schedule": "constant"}), 9, 10) == 2.0
    assert scheduled_rate(section.model_copy(update={"warmup_ratio": 0.0}), 0, 10) == 2.0
