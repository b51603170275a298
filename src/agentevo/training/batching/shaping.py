"""Changes rewards by the length of trajectories, as the recipe's `length_shaping` specifies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentevo.algorithms.shaping import cosine_length, linear_length, relative_length, soft_overlong
from agentevo.config import AlgorithmSection
from agentevo.types import Trajectory

PART = "length"
"""The part of the reward that has the change by length."""
REST = "task"
"""The part that has the original reward, if it had no parts."""
COSINE_REWARDS = ("success_short", "success_long", "failure_short", "failure_long", "exceeded")


def shape_by_length(
    trajectories: Sequence[Trajectory], section: AlgorithmSection, length_max: int
) -> list[Trajectory]:
    """The same trajectories with rewards changed by their trained tokens. The parts of each still
    sum to its reward."""
    if section.length_shaping == "none" or not trajectories:
        return list(trajectories)
    return [
        with_final_reward(t, reward)
        for t, reward in zip(trajectories, _rewards(trajectories, section, length_max), strict=True)
    ]


def _rewards(
    trajectories: Sequence[Trajectory], section: AlgorithmSection, length_max: int
) -> list[float]:
    rewards = [t.reward for t in trajectories]
    lengths = [t.num_completion_tokens() for t in trajectories]
    weight = 1.0 if section.length_weight is None else section.length_weight
    if section.length_shaping == "soft_overlong":
        buffer = section.length_buffer or max(1, length_max // 5)
        return soft_overlong(rewards, lengths, max_length=length_max, buffer=buffer, penalty=weight)

    if section.length_shaping == "linear":
        return linear_length(rewards, lengths, per_token=weight)

    successes = [t.success for t in trajectories]
    if section.length_shaping == "cosine":
        chosen = (
            dict(zip(COSINE_REWARDS, section.length_rewards, strict=True))
            if section.length_rewards is not None
            else {}
        )
        return cosine_length(lengths, successes, max_length=length_max, **chosen)

    return relative_length(
        rewards, lengths, successes, [t.group_id for t in trajectories], weight=weight
    )


def with_final_reward(trajectory: Trajectory, reward: float) -> Trajectory:
    """The same trajectory with another reward. The part PART has the change. A reward of the recipe
    may have that name too; its part stays the same if the reward does, to the last bit."""
    parts = dict(trajectory.reward_parts) or {REST: trajectory.reward}
    parts[PART] = parts.get(PART, 0.0) + (reward - trajectory.reward)
    return msgspec.structs.replace(trajectory, reward=reward, reward_parts=parts)
