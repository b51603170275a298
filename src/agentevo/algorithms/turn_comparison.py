"""Estimators that credit turns, and compare a turn with others of its group.

Each is a recursion as in returns.py: it takes the validated inputs and their stream and returns
advantages and returns, both [M] float64 in the order of the stream. All tokens of a turn get its
advantage. k is an index over turns; R_k is what the attempt earned from turn k on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agentevo.algorithms.entries import EntryTable, Hyperparameter
from agentevo.algorithms.group_relative import (
    EPSILON,
    SCALE_BY_STD,
    AdvantageEntry,
    Members,
    grpo,
)
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.returns import (
    TURN_GAMMA,
    TurnStream,
    discount_sums,
    spread,
    turn_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor

    from agentevo.algorithms.advantage_inputs import Inputs

_TURN_BASELINE = Hyperparameter(
    "turn_baseline",
    "all",
    "what a turn is compared with: `all` turns of the group; `place`, those at the same place of "
    "their attempts (along the tree: at the same depth); `none`",
    choices=("all", "place", "none"),
)


COMPARISONS = EntryTable("advantage", AdvantageEntry)
"""Estimators that compare turns, (inputs, stream, **hyper) -> advantages [M], returns [M]."""


@COMPARISONS.entry(
    meaning="return-to-go of each turn against all turns of the group",
    formula="R_k = r_k + gamma R_{k+1}; A_k = (R_k - mean) / (std + epsilon), mean and std over "
    "the turns of the group, or over its k-th turns; returns R",
    source="step rewards of GRPO with process supervision, DeepSeekMath, arXiv 2402.03300, "
    "section 4.1.3, with a discount per turn",
    hyper=(TURN_GAMMA, SCALE_BY_STD, EPSILON, _TURN_BASELINE),
    needs=("turn_ids",),
    within_group=True,
)
def turn_returns(
    inputs: Inputs,
    stream: TurnStream,
    *,
    gamma: float,
    scale_by_std: bool,
    epsilon: float,
    turn_baseline: str,
) -> tuple[Tensor, Tensor]:
    """`against_group` compares the turns; all tokens of a turn get its advantage."""
    returns = discount_sums(turn_rewards(inputs, stream), stream.num_turns, gamma)
    how = GroupComparison(scale_by_std, epsilon, turn_baseline)
    advantages = against_group(inputs, stream, returns, turn_places(stream), how)
    return _of_tokens(stream, advantages, returns)


@COMPARISONS.entry(
    meaning="return-to-go of each turn along the tree of turns, against all turns of the group",
    formula="R_k = r_k + gamma sum of R over the turns that continue k; A_k = (R_k - mean) / (std "
    "+ epsilon), mean and std over the turns of the group, or over those as deep as k; returns R",
    source="as turn_returns, on trajectories that branch",
    hyper=(TURN_GAMMA, SCALE_BY_STD, EPSILON, _TURN_BASELINE),
    needs=("turn_ids", "turn_parents"),
    within_group=True,
)
def tree_returns(
    inputs: Inputs,
    stream: TurnStream,
    *,
    gamma: float,
    scale_by_std: bool,
    epsilon: float,
    turn_baseline: str,
) -> tuple[Tensor, Tensor]:
    """`against_group` compares the turns, where the place of a turn is its depth in the tree: a
    turn is credited with what its own branch earned, not with what a sibling branch earned later.

    `turn_parents` names the turn that each one continues; one whose parent is no earlier trained
    turn of the trajectory continues the turn before it. Without branches this is `turn_returns`. A
    group of one trajectory gives 0.
    """
    parent = _tree_parents(inputs, stream)
    returns = _discounted_along_tree(turn_rewards(inputs, stream), parent, gamma)
    how = GroupComparison(scale_by_std, epsilon, turn_baseline)
    advantages = against_group(inputs, stream, returns, _tree_depths(stream, parent), how)
    return _of_tokens(stream, advantages, returns)


@COMPARISONS.entry(
    meaning="the score of the attempt against its group, and what followed each turn against what "
    "followed other turns of the group that answered the same observation (GiGPO)",
    formula="A_k = (s_i - mu_g) / (std_g + epsilon) + turn_weight (R_k - mean_x) / (std_x + "
    "epsilon), R_k = r_k + gamma R_{k+1}, mean_x and std_x over the turns of the group that answer "
    "the observation x of turn k; returns R",
    source="GiGPO, arXiv 2505.10978, eq. 3 to 8",
    hyper=(
        Hyperparameter("gamma", 0.95, "discount per turn", low=0.0, high=1.0),
        Hyperparameter(
            "turn_weight", 1.0, "weight of the second term; the attempt has weight 1", low=0.0
        ),
        SCALE_BY_STD,
        EPSILON,
    ),
    needs=("turn_ids", "turn_observations"),
    within_group=True,
    peers={
        "verl-agent": "gigpo; step_advantage_w is turn_weight, mode=mean_norm is scale_by_std=false"
    },
)
def gigpo(
    inputs: Inputs,
    stream: TurnStream,
    *,
    gamma: float,
    turn_weight: float,
    scale_by_std: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """A turn whose observation no other turn of the group answers has the first term only."""
    assert inputs.turn_observations is not None  # `Advantage` checks its `needs`

    first_tokens = stream.index[_first_places(stream)]
    observations = inputs.turn_observations.reshape(-1)[first_tokens]
    places = torch.unique(observations, return_inverse=True)[1]

    returns = discount_sums(turn_rewards(inputs, stream), stream.num_turns, gamma)
    how = GroupComparison(scale_by_std, epsilon, "place")
    of_turns = against_group(inputs, stream, returns, places, how)

    of_attempts = grpo(inputs, scale_by_std=scale_by_std, epsilon=epsilon)
    owner = inputs.trajectory[first_tokens // stream.width]
    advantages = of_attempts[owner] + turn_weight * of_turns
    return _of_tokens(stream, advantages, returns)


@COMPARISONS.entry(
    meaning="the credit that your own function gives each turn (algorithm.credit)",
    formula="R_k = credit(group)_k; A_k = (R_k - mean) / (std + epsilon), mean and std over the "
    "turns of the group, or over its k-th turns; turn_baseline=none: A_k = R_k; returns R",
    source="your function; docs/rewards.md",
    hyper=(SCALE_BY_STD, EPSILON, _TURN_BASELINE),
    needs=("turn_ids", "turn_credit"),
)
def credit(
    inputs: Inputs, stream: TurnStream, *, scale_by_std: bool, epsilon: float, turn_baseline: str
) -> tuple[Tensor, Tensor]:
    """`against_group` compares the turns."""
    assert inputs.turn_credit is not None  # `Advantage` checks its `needs`
    returns = stream.at(inputs.turn_credit)[_first_places(stream)]
    how = GroupComparison(scale_by_std, epsilon, turn_baseline)
    advantages = against_group(inputs, stream, returns, turn_places(stream), how)
    return _of_tokens(stream, advantages, returns)


def _of_tokens(stream: TurnStream, advantages: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns of turns [K], repeated for the tokens of each. [M], [M]"""
    return spread(advantages, stream.turn), spread(returns, stream.turn)


def _first_places(stream: TurnStream) -> Tensor:
    """The place in the stream of each turn's first token. [K]"""
    return stream.turn.cumsum(0) - stream.turn


def turn_places(stream: TurnStream) -> Tensor:
    """The place of each turn in its trajectory, from 0. [K]"""
    first = spread(stream.num_turns.cumsum(0) - stream.num_turns, stream.num_turns)
    return torch.arange(len(stream.turn), device=stream.index.device) - first


class GroupComparison(NamedTuple):
    """How `against_group` compares turns."""

    scale_by_std: bool
    epsilon: float
    turn_baseline: str


def against_group(
    inputs: Inputs, stream: TurnStream, returns: Tensor, places: Tensor, how: GroupComparison
) -> Tensor:
    """A_k = (R_k - mean) / (std + epsilon), without the division if not `scale_by_std`, of the
    returns of turns [K]; std is unbiased. [K]

    `turn_baseline`: mean and std are over all turns of the group (`all`), or over those with the
    same of `places` [K] (`place`): the only turn at a place gets 0. A group of one trajectory gives
    0. `none`: the returns themselves.
    """
    if how.turn_baseline == "none":
        return returns

    owner = inputs.trajectory[stream.row[stream.turn.cumsum(0) - 1]]
    group = inputs.members.group[owner]
    if how.turn_baseline == "place":
        group = group * (places.max() + 1) + places if len(places) else group

    turns = Members(group, torch.ones_like(owner, dtype=torch.bool))
    advantages = turns.normalise(returns, scale_by_std=how.scale_by_std, epsilon=how.epsilon)
    return torch.where(inputs.members.size[owner] > 1.0, advantages, 0.0)


def _discounted_along_tree(rewards: Tensor, parent: list[int], gamma: float) -> Tensor:
    """x_k = rewards_k + gamma times the sum of x over the k' with parent_k' = k. rewards [K];
    parent_k < k, or -1. [K]"""
    sums = rewards.tolist()
    for turn in range(len(sums) - 1, -1, -1):
        if parent[turn] >= 0:
            sums[parent[turn]] += gamma * sums[turn]
    return rewards.new_tensor(sums)


def _tree_depths(stream: TurnStream, parent: list[int]) -> Tensor:
    """The number of turns before each one on its path. parent_k < k, or -1. [K]"""
    depth: list[int] = []
    for turn in parent:
        depth.append(depth[turn] + 1 if turn >= 0 else 0)
    return stream.turn.new_tensor(depth)


def _tree_parents(inputs: Inputs, stream: TurnStream) -> list[int]:
    """The parent of each turn 0..K-1, in the order of the stream; -1 for the first turn of a
    trajectory."""
    assert (
        inputs.turn_ids is not None and inputs.turn_parents is not None
    )  # `Advantage` checks its `needs`

    first = _first_places(stream)
    at = stream.index[first]
    names = inputs.turn_ids.reshape(-1)[at].tolist()

    parent_ids = inputs.turn_parents.reshape(-1)[at].tolist()
    owners = inputs.trajectory[stream.row[first]].tolist()
    turn_numbers: dict[tuple[int, int], int] = {}
    parent_of_turn = []
    for turn, (owner, name, parent) in enumerate(zip(owners, names, parent_ids, strict=True)):
        before = turn - 1 if turn and owners[turn - 1] == owner else -1
        parent_of_turn.append(turn_numbers.get((owner, parent), before))
        turn_numbers[owner, name] = turn

    return parent_of_turn
