"""Attempts whose tokens are of several versions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from agentevo.config import TrainerSection
from agentevo.types import Sample, Trajectory, Turn

STILL = TrainerSection(learning_rate=1e-12, warmup_steps=0, max_grad_norm=1e9)


NOW = 7
"""Version of the trainer."""


def conversation(
    rng: random.Random, prompt: list[int], sizes: Iterable[int], versions: Iterator[int]
) -> list[Turn]:
    """Turns whose completions have these sizes, and their tokens these versions."""
    turns: list[Turn] = []
    for index, size in enumerate(sizes):
        said = [rng.randrange(2, 97) for _ in range(size)]
        turns.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=prompt if index == 0 else [3, 4],
                completion_ids=said,
                logprobs=[rng.uniform(-6, -3) for _ in said],
                versions=[next(versions) for _ in said],
                finish_reason="stop",
            )
        )

    return turns


def attempts(seed: int = 4, newest: int = NOW, oldest: int = NOW - 3) -> list[Trajectory]:
    """Two groups of three conversations of two turns; within each the versions only grow, as
    engines' do."""
    rng = random.Random(seed)
    trajectories = []
    for number in range(6):
        group = number // 3
        sizes = [rng.randrange(1, 5), rng.randrange(1, 5)]
        versions = sorted(rng.randrange(oldest, newest + 1) for _ in range(sum(sizes)))
        turns = conversation(rng, [5 + group, *range(20, 27)], sizes, iter(versions))
        reward = rng.choice([0.0, 0.5, 1.0]) + (number == 0)
        trajectories.append(
            Trajectory(
                id=f"t{number}",
                task_id=f"q{group}",
                group_id=f"g{group}",
                reward=reward,
                success=reward > 0.5,
                turns=turns,
            )
        )

    return trajectories


def places(sample: Sample) -> list[int]:
    return [place for place, trained in enumerate(sample.loss_mask) if trained]
