"""The gradient that every preset finds for the same attempts, from their rewards on: advantages,
what is computed beforehand, and the loss."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.presets import PREFERENCE_PRESETS, PRESETS
from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.training.pairs import CandidateAnswer, Pair
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory, Turn

NAMES = tuple(PRESETS)
WHOLE = 1 << 20
"""Tokens of a micro-batch that everything fits into."""
VOCABULARY = 97


def attempts() -> list[Trajectory]:
    """Groups of unequal sizes, two turns each, that earn something in each turn. Log-probs are
    those of another policy."""
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def turn(index: int, prompt: list[int]) -> Turn:
        count = rng.randrange(3, 12)
        return Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=prompt,
            completion_ids=draw(count),
            logprobs=[rng.uniform(-6, -3) for _ in range(count)],
            versions=[0] * count,
            finish_reason="stop",
            reward=rng.random(),
        )

    found = []
    for group, size in enumerate((4, 3, 5, 4)):
        prompt = draw(12)
        for member in range(size):
            turns = [turn(0, prompt), turn(1, draw(4))]
            names = {"id": f"{group}-{member}", "task_id": f"t{group}", "group_id": f"g{group}"}
            reward = sum(turn.reward for turn in turns)
            found.append(Trajectory(**names, turns=turns, reward=reward, success=reward > 1.0))

    return found


def find_gradient(model: PreTrainedModel, name: str, micro_batch_tokens: int) -> torch.Tensor:
    """Of all parameters as one vector, in an update of one minibatch that clips nothing: AdamW's
    first mean after a step is a share of it."""
    section = TrainerSection(
        learning_rate=1e-6,
        warmup_steps=0,
        minibatches=1,
        max_grad_norm=1e12,
        micro_batch_tokens=micro_batch_tokens,
    )
    algorithm = AlgorithmSection(name=name)
    kind: Any = PreferenceTrainer if name in PREFERENCE_PRESETS else Trainer
    trainer = kind(model, section, algorithm)
    trainer.begin()
    trained = (
        spin_pairs()
        if name == "spin"
        else trainer.prepare(attempts(), {f"t{group}": 0.8 for group in range(4)}).samples
    )
    trainer.step(trained)

    optimizer = trainer.optimization.optimizer
    share = 1 - optimizer.param_groups[0]["betas"][0]
    means = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return torch.cat([mean.flatten() for mean in means]) / share


def spin_pairs() -> list[Pair]:
    """Each attempt after a demonstration that another stands for: the solver of an environment
    writes them in a run."""

    def answer(attempt: Trajectory) -> CandidateAnswer:
        turn = attempt.turns[0]
        prompt = list(turn.prompt_ids)
        said = list(turn.completion_ids)
        row = Sample(
            trajectory_id=attempt.id,
            group_id=attempt.group_id,
            ids=[*prompt, *said],
            loss_mask=[False] * len(prompt) + [True] * len(said),
            logprobs=[0.0] * len(prompt) + list(turn.logprobs),
            versions=[-1] * len(prompt) + [0] * len(said),
            advantages=[0.0] * len(said),
        )
        return CandidateAnswer(attempt.id, (row,))

    answers = {attempt.id: answer(attempt) for attempt in attempts()}
    return [
        Pair(f"g{group}", answers[f"{group}-{member}"], answers[f"{group}-{member + 1}"])
        for group in range(4)
        for member in (0, 1)
    ]
