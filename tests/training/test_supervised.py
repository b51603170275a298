"""Supervised training: what the assistant says is learned, and nothing else."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from agentevo.config import ColdStartSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.supervised import conversation_sample, train_supervised
from agentevo.types import Message

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


def train(loaded, samples, section: ColdStartSection, trainer: TrainerSection | None = None, **options):
    options = {"seed": 0, "progress": no_progress} | options
    return train_supervised(loaded.model, samples, section, trainer or TrainerSection(), **options)


def test_only_the_assistants_tokens_are_trained(loaded, chat):
    sample = conversation_sample(TALK, chat, "demo")
    runs = re.findall("1+", "".join("1" if m else "0" for m in sample.loss_mask))
    trained = [token for token, m in zip(sample.ids, sample.loss_mask, strict=True) if m]
    assert len(runs) == 2
    assert loaded.tokenizer.decode(trained) == "left<|end|>Up Down<|end|>"
    whole = "<|system|>Go on.<|end|><|user|>Take the left coin or the right one.<|end|><|assistant|>left<|end|>"
    assert loaded.tokenizer.decode(sample.ids) == f"{whole}<|user|>You win. Go on.<|end|><|assistant|>Up Down<|end|>"
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions) == len(sample.advantages)


def test_a_sample_is_what_the_policy_would_have_seen(chat):
    """The same ids as an episode in which the policy says these words."""
    sample = conversation_sample(TALK, chat, "demo")
    ids = [
        *chat.first_prompt(TALK[:2]),
        *chat.completion("left"),
        *chat.continuation([TALK[3]], ended_with_stop=True),
        *chat.completion("Up Down"),
    ]
    assert sample.ids == ids


def test_an_update_has_the_gradient_of_the_mean_loss_per_token(loaded, chat, gradient):
    """Against transformers' own attention, one conversation at a time; micro-batches don't change it."""
    alone = copy.deepcopy(loaded.model)
    alone.set_attn_implementation("eager")
    samples = [conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER, TALK[1:3]))]
    losses = []
    for sample in samples:
        ids = torch.tensor([sample.ids])
        logp = torch.log_softmax(alone(input_ids=ids).logits[0], -1)
        losses += [-logp[place - 1, sample.ids[place]] for place, m in enumerate(sample.loss_mask) if m]
    expected = torch.stack(losses).mean()
    expected.backward()
    for micro_batch_tokens in (16384, 64):
        model = copy.deepcopy(loaded.model)
        section = TrainerSection(max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
        (found,) = train_supervised(model, samples, ColdStartSection(batch_episodes=3), section, seed=0, progress=no_progress)
        assert found == pytest.approx(float(expected), rel=1e-5)
        assert float((gradient(model) - gradient(alone)).norm() / gradient(alone).norm()) < 1e-5


def test_what_is_demonstrated_is_learned(loaded, chat):
    samples = [conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER))]
    losses = train(loaded, samples, ColdStartSection(epochs=60, batch_episodes=2, learning_rate=3e-3))
    assert len(losses) == 60
    assert losses[0] > 3.0
    assert losses[-1] < 0.1


def test_epochs_batches_and_progress(loaded, chat):
    samples = [conversation_sample(OTHER, chat, str(n)) for n in range(5)]
    seen = []
    losses = train(loaded, samples, ColdStartSection(epochs=2, batch_episodes=2), progress=lambda *told: seen.append(told))
    assert [(done, total) for done, total, _ in seen] == [(n, 6) for n in range(1, 7)]
    assert [loss for *_, loss in seen] == losses


def test_samples_of_one_episode_stay_in_one_batch(loaded, chat):
    """An agent without memory has a conversation for every turn; `batch_episodes` counts episodes all the same."""
    samples = [conversation_sample(OTHER, chat, f"episode-{n // 3}") for n in range(12)]
    assert len(train(loaded, samples, ColdStartSection(batch_episodes=2))) == 2


def test_order_follows_the_seed(tiny_policy, chat):
    samples = [conversation_sample(talk, chat, str(n)) for n, talk in enumerate((TALK, OTHER, TALK[:3]))]
    section = ColdStartSection(epochs=2, batch_episodes=1)
    same, again, other = (train(tiny_policy(seed=3), samples, section, seed=seed) for seed in (1, 1, 2))
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
