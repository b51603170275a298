"""Returns along the tree of a trajectory's turns: a turn is credited with what its own branch
earned, not with what a sibling branch earned later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from agentevo.algorithms.returns import (
    Comparison,
    Stream,
    against_group,
    spread,
    turn_rewards,
)

if TYPE_CHECKING:
    from agentevo.algorithms.advantage_inputs import Inputs


def tree_returns(
    inputs: Inputs,
    stream: Stream,
    *,
    gamma: float,
    scale_by_std: bool,
    epsilon: float,
    turn_baseline: str,
) -> tuple[Tensor, Tensor]:
    """R_k = r_k + gamma sum of R over the turns that go on from k, against other turns of the group
    (`returns.against_group`), where the place of a turn is its depth in the tree.

    `turn_parents` names the turn that each goes on from; one whose parent is no earlier trained
    turn of the trajectory goes on from the turn before it. Without branches this is
    `returns.turn_returns`. A group of one trajectory gives 0. Returns R.
    """
    parent = parents(inputs, stream)
    returns = along_tree(turn_rewards(inputs, stream), parent, gamma)
    how = Comparison(scale_by_std, epsilon, turn_baseline)
    advantages = against_group(inputs, stream, returns, depths(stream, parent), how)
    return spread(advantages, stream.turn), spread(returns, stream.turn)


def along_tree(rewards: Tensor, parent: list[int], gamma: float) -> Tensor:
    """x_k = rewards_k + gamma times the sum of x over the k' with parent_k' = k. rewards [K];
    parent_k < k, or -1. [K]"""
    sums = rewards.tolist()
    for turn in range(len(sums) - 1, -1, -1):
        if parent[turn] >= 0:
            sums[parent[turn]] += gamma * sums[turn]
    return rewards.new_tensor(sums)


def depths(stream: Stream, parent: list[int]) -> Tensor:
    """How many turns are before each one on its path. parent_k < k, or -1. [K]"""
    depth: list[int] = []
    for turn in parent:
        depth.append(depth[turn] + 1 if turn >= 0 else 0)
    return stream.turn.new_tensor(depth)


def parents(inputs: Inputs, stream: Stream) -> list[int]:
    """The parent of each turn 0..K-1, in the order of the stream; -1 for the first turn of a
    trajectory."""
    assert (
        inputs.turn_ids is not None and inputs.turn_parents is not None
    )  # `Advantage` checks its `needs`

    first = stream.turn.cumsum(0) - stream.turn
    at = stream.index[first]
    names = inputs.turn_ids.reshape(-1)[at].tolist()

    wanted = inputs.turn_parents.reshape(-1)[at].tolist()
    owners = inputs.trajectory[stream.row[first]].tolist()
    known: dict[tuple[int, int], int] = {}
    parent_of_turn = []
    for turn, (owner, name, parent) in enumerate(zip(owners, names, wanted, strict=True)):
        before = turn - 1 if turn and owners[turn - 1] == owner else -1
        parent_of_turn.append(known.get((owner, parent), before))
        known[owner, name] = turn

    return parent_of_turn
