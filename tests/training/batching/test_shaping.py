"""The length's part of a reward: by hand for each shaping, and the parts still sum to the
reward."""

from __future__ import annotations

import math

import pytest

from agentevo.config import AlgorithmSection
from agentevo.training.batching.shaping import shape_by_length
from agentevo.types import Trajectory, Turn


def attempt(
    name: str, lengths: list[int], reward: float, *, success: bool = True, **parts: float
) -> Trajectory:
    """Turns of so many tokens; prompts of 50 tokens, which must not count."""
    turns = [
        Turn(
            index=i,
            prompt_ids=[1] * 50,
            completion_ids=[2] * n,
            logprobs=[0.0] * n,
            versions=[0] * n,
            finish_reason="stop",
        )
        for i, n in enumerate(lengths)
    ]
    return Trajectory(
        id=name,
        task_id="t",
        group_id=name[0],
        turns=turns,
        reward=reward,
        success=success,
        reward_parts=parts,
    )


ATTEMPTS = [
    attempt("a0", [4, 6], 1.0, environment=1.1, format=-0.1),
    attempt("a1", [90], 1.0, environment=1.0),
    attempt("a2", [60, 60], 0.0, success=False),
    attempt("b0", [100], -1.0, success=False),
]


def cosine(length: int, short: float, long: float, longest: int = 100) -> float:
    return long + (short - long) * (1 + math.cos(math.pi * length / longest)) / 2


@pytest.mark.parametrize(
    ("keys", "rewards"),
    [
        # 100 is too long, the last 20 tokens before it are the buffer: 90 is half-way through
        ({"length_shaping": "soft_overlong"}, [1.0, 0.5, -1.0, -2.0]),
        (
            {"length_shaping": "soft_overlong", "length_buffer": 40, "length_weight": 0.5},
            [1.0, 1 - 0.5 * 0.75, -0.5, -1.5],
        ),
        ({"length_shaping": "linear", "length_weight": 0.01}, [0.9, 0.1, -1.2, -2.0]),
        ({"length_shaping": "cosine"}, [cosine(10, 2, 1), cosine(90, 2, 1), -10, -10]),
        (
            {"length_shaping": "cosine", "length_rewards": (3, 2, -1, 0.5, -7)},
            [cosine(10, 3, 2), cosine(90, 3, 2), -7, -7],
        ),
        # group a runs from 10 to 120 tokens; b is alone; a failure is never rewarded for being
        # short
        ({"length_shaping": "relative"}, [1.5, 1 + 0.5 - 80 / 110, -0.5, -1.0]),
        (
            {"length_shaping": "relative", "length_weight": 0.2},
            [1.1, 1 + 0.2 * (0.5 - 80 / 110), -0.1, -1.0],
        ),
    ],
    ids=str,
)
def test_rewards_by_hand(keys, rewards):
    shaped = shape_by_length(ATTEMPTS, AlgorithmSection(**keys), 100)
    assert [t.reward for t in shaped] == pytest.approx(rewards)
    for before, after in zip(ATTEMPTS, shaped, strict=True):
        assert (after.id, after.turns, after.success) == (before.id, before.turns, before.success)
        assert after.reward_parts["length"] == pytest.approx(after.reward - before.reward)
        assert sum(after.reward_parts.values()) == pytest.approx(after.reward)
        assert {k: v for k, v in after.reward_parts.items() if k != "length"} == (
            before.reward_parts or {"task": before.reward}
        )


def test_a_part_of_that_name_is_added_to():
    (shaped,) = shape_by_length(
        [attempt("a", [10], 0.8, length=-0.2, answer=1.0)],
        AlgorithmSection(length_shaping="linear", length_weight=0.01),
        9,
    )
    assert shaped.reward_parts == pytest.approx({"length": -0.3, "answer": 1.0})


def test_none_changes_nothing():
    assert shape_by_length(ATTEMPTS, AlgorithmSection(), 100) == ATTEMPTS
    assert shape_by_length([], AlgorithmSection(length_shaping="relative"), 100) == []


def test_a_short_limit_still_has_a_buffer():
    section = AlgorithmSection(length_shaping="soft_overlong")
    assert [
        t.reward
        for t in shape_by_length([attempt("a", [2], 0.0), attempt("a", [3], 0.0)], section, 3)
    ] == [0.0, -1.0]
