"""Advantage estimators: how much better an attempt was than expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grpo(rewards: torch.Tensor, group_ids: Sequence[str], *, scale_by_std: bool = True, epsilon: float = 1e-6) -> torch.Tensor:
    """Group-relative advantages, A_i = (r_i - mean_g) / (std_g + epsilon), one per trajectory.

    rewards [N] float, group_ids N names; members of a group may stand anywhere. std is the unbiased one (N - 1), as in TRL and verl.
    A group of one has advantage 0. `scale_by_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783).
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    if len(group_ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids: give one group id per reward")
    advantages = torch.zeros_like(rewards)
    members: dict[str, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        if len(indices) == 1:
            continue
        group_rewards = rewards[indices]
        centred = group_rewards - group_rewards.mean()
        spread = group_rewards.std() if len(set(group_rewards.tolist())) > 1 else torch.zeros(())
        if spread == 0:  # equal rewards: exactly 0, not rounding noise over epsilon
            continue
        advantages[indices] = centred / (spread + epsilon) if scale_by_std else centred
    return advantages
