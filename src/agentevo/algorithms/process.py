"""Advantages from rewards of single steps that a process reward model gives beside the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentevo.algorithms.group_relative import divide, rloo
from agentevo.algorithms.group_relative import whiten as whitened
from agentevo.algorithms.returns import Stream, discounted

if TYPE_CHECKING:
    from agentevo.algorithms.advantage_inputs import Inputs


def prime(
    inputs: Inputs, stream: Stream, *, gamma: float, process_coef: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Leave-one-out on outcomes plus the discounted sum of process rewards over the others' mean
    process reward.

    With p_t the process rewards, m_j their mean over trajectory j, n trajectories in the group, s
    the scores: A_t = s_i - mean_{j != i} s_j + process_coef sum_{u >= t} gamma^(u - t) (p_u -
    mean_{j != i} m_j), 0 in a group of one. Returns A before it is whitened over the batch's
    trained tokens. Source: PRIME, arXiv 2502.01456, eq. 6; its code whitens.
    """
    assert inputs.process_rewards is not None  # `Advantage` checks its `needs`

    rewards = stream.at(inputs.process_rewards)
    owner = inputs.trajectory[stream.row]
    mean = divide(
        torch.zeros_like(inputs.score).index_add_(0, owner, rewards), inputs.length.clamp(min=1.0)
    )

    size = inputs.members.size
    others = divide(inputs.members.total(mean) - mean, (size - 1.0).clamp(min=1.0))
    running = discounted(rewards - others[owner], stream.lengths, gamma)
    advantages = torch.where(size[owner] > 1.0, rloo(inputs)[owner] + process_coef * running, 0.0)
    return whitened(advantages) if whiten else advantages, advantages
