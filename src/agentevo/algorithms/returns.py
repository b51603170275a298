"""Estimators by recursion over tokens or turns.

They run along streams: the trained tokens of a trajectory in the order of its turns where
`turn_ids` are given (its rows may then be anywhere), otherwise the trained tokens of each row
separately. Observation tokens are skipped: the successor of a trained token is the next trained
token. After the end of a stream reward and value are 0.

Each takes the validated inputs and their stream and returns advantages and returns, both [M]
float64 in the order of the stream. In the formulas t is an index over trained tokens, k one over
turns; the other symbols are those of group_relative.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from agentevo.algorithms.entries import EntryTable, Hyperparameter
from agentevo.algorithms.group_relative import (
    MAX_MAGNITUDE,
    WHITEN,
    AdvantageEntry,
    Members,
    divide,
    rloo,
)
from agentevo.algorithms.group_relative import whiten as whitened
from agentevo.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

    from agentevo.algorithms.advantage_inputs import Inputs

_GAMMA = Hyperparameter("gamma", 1.0, "discount per trained token", low=0.0, high=1.0)
TURN_GAMMA = Hyperparameter("gamma", 1.0, "discount per turn", low=0.0, high=1.0)
_LAM = Hyperparameter(
    "lam", 1.0, "lambda of GAE: 0 trusts the critic, 1 the rewards", low=0.0, high=1.0
)
RECURSIONS = EntryTable("advantage", AdvantageEntry)
"""Estimators by recursion, (inputs, stream, **hyper) -> advantages [M], returns [M]."""


@dataclass(frozen=True)
class TurnStream:
    """All M trained tokens, stream after stream. Segments (streams, turns) are described by their
    lengths, which add up to M."""

    index: Tensor
    """[M]: the place of each token in the flattened table [S * T]."""
    width: int
    """T, at least 1."""
    lengths: Tensor
    """The number of tokens of each stream."""
    turn_lengths: Tensor | None
    """The number of tokens of each of K turns, in the order of the streams; None without turn
    ids."""
    turns: Tensor | None
    """The number of turns of each stream; None without turn ids."""

    def at(self, values: Tensor) -> Tensor:
        """Values [S, T] of the tokens. [M] float64, within +-MAX_MAGNITUDE"""
        return values.reshape(-1)[self.index].double().clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)

    @property
    def row(self) -> Tensor:
        """The row of each token. [M]"""
        return self.index // self.width

    @cached_property
    def turn_of(self) -> Tensor:
        """The turn, 0..K-1, to which each token belongs. [M]"""
        return spread(torch.arange(len(self.turn), device=self.index.device), self.turn)

    @property
    def turn(self) -> Tensor:
        """`turn_lengths`, which recursions over turns always have."""
        assert self.turn_lengths is not None
        return self.turn_lengths

    @property
    def num_turns(self) -> Tensor:
        """`turns`, which recursions over turns always have."""
        assert self.turns is not None
        return self.turns


def make_stream(inputs: Inputs) -> TurnStream:
    """Makes the streams of the inputs. Raises ValueError if two rows of a trajectory train the same
    turn."""
    width = max(inputs.mask.shape[1], 1)
    index = inputs.mask.reshape(-1).nonzero()[:, 0]
    if inputs.turn_ids is None:
        return TurnStream(
            index, width, inputs.row_length[inputs.row_length > 0.0].long(), None, None
        )

    owner = inputs.trajectory[index // width]
    turn = inputs.turn_ids.reshape(-1)[index]
    if bool(
        ((owner[1:] < owner[:-1]) | ((owner[1:] == owner[:-1]) & (turn[1:] < turn[:-1]))).any()
    ):
        order = turn.argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]
        index = index[order]
        owner = owner[order]
        turn = turn[order]

    same_owner = owner[1:] == owner[:-1]
    same = same_owner & (turn[1:] == turn[:-1])

    row = index // width
    twice = (same & (row[1:] != row[:-1])).nonzero()
    if len(twice):
        at = int(twice[0, 0])
        raise ValueError(
            f"turn_ids: turn {int(turn[at])} of one trajectory is trained in rows {int(row[at])} "
            f"and {int(row[at + 1])}: mask it in all "
            "rows but one, or give the rows different trajectory ids"
        )

    turn_lengths = _segments(same, len(index))
    turns = torch.unique_consecutive(
        owner[turn_lengths.cumsum(0) - turn_lengths], return_counts=True
    )[1]
    return TurnStream(index, width, _segments(same_owner, len(index)), turn_lengths, turns)


def _segments(continues: Tensor, count: int) -> Tensor:
    """The lengths of the segments of `count` places; the argument tells for each place but the
    first whether it continues the segment before it."""
    starts = torch.cat([continues.new_ones(min(count, 1)), ~continues]).nonzero()[:, 0]
    return starts.diff(append=starts.new_tensor([count]))


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """One value per segment, repeated over the segment."""
    return values.repeat_interleave(lengths)


def discount_sums(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """x_k = values_k + factor x_{k+1} within each segment, x = 0 after its end. values [M]; lengths
    of the segments, which add up to M.

    Takes one step per place from the end, for all segments that reach there: as many steps as the
    longest segment has values.
    """
    result = torch.zeros_like(values)
    if not values.numel():
        return result

    ordered = lengths.argsort(descending=True, stable=True)
    ends = (lengths.cumsum(0) - 1)[ordered]
    reach = len(lengths) - torch.bincount(lengths).cumsum(
        0
    )  # how many segments are longer than 0, 1, 2, ...
    carried = values.new_zeros(len(lengths))
    for step, num_left in enumerate(reach[:-1].tolist()):
        at = ends[:num_left] - step
        carried = torch.add(values[at], carried[:num_left], alpha=factor)
        result[at] = carried

    return result


def following(values: Tensor, lengths: Tensor) -> Tensor:
    """The next value within the segment, 0 at its end. [M]"""
    result = torch.zeros_like(values)
    result[:-1] = values[1:]
    result[lengths.cumsum(0) - 1] = 0.0
    return result


def estimate(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """delta_k = r_k + gamma V_{k+1} - V_k; A_k = delta_k + gamma lam A_{k+1}, within each segment.
    All [M].

    Source: GAE, arXiv 1506.02438, eq. 16.
    """
    return discount_sums(
        rewards + gamma * following(values, lengths) - values, lengths, gamma * lam
    )


def turn_rewards(inputs: Inputs, stream: TurnStream) -> Tensor:
    """Sum of the rewards of each turn. [K]"""
    return inputs.score.new_zeros(len(stream.turn)).index_add_(
        0, stream.turn_of, stream.at(inputs.rewards)
    )


@RECURSIONS.entry(
    meaning="return-to-go of each token, whitened over the batch (REINFORCE++)",
    formula="G_t = r_t + gamma G_{t+1}; A = whiten(G); returns G",
    source="REINFORCE++, arXiv 2501.03262",
    hyper=(_GAMMA,),
    peers={"verl": "reinforce_plus_plus; up to 0.8 it lost the return at observation tokens"},
)
def reinforce_pp(inputs: Inputs, stream: TurnStream, *, gamma: float) -> tuple[Tensor, Tensor]:
    returns = discount_sums(stream.at(inputs.rewards), stream.lengths, gamma)
    return whitened(returns), returns


@RECURSIONS.entry(
    meaning="return-to-go of each token against the score of a greedy attempt at the same task",
    formula="A_t = G_t - b, G_t = r_t + gamma G_{t+1}; returns G",
    source="ReMax, arXiv 2310.10505",
    hyper=(_GAMMA,),
    needs=("baseline_rewards",),
    peers={"verl": "remax"},
)
def remax(inputs: Inputs, stream: TurnStream, *, gamma: float) -> tuple[Tensor, Tensor]:
    """b is `baseline_rewards` of the token's row."""
    assert inputs.baseline_rewards is not None  # `Advantage` checks its `needs`
    returns = discount_sums(stream.at(inputs.rewards), stream.lengths, gamma)
    return returns - inputs.baseline_rewards[stream.row], returns


@RECURSIONS.entry(
    meaning="generalised advantage estimation with a critic, over trained tokens",
    formula="delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns A + "
    "V; then A = whiten(A)",
    source="GAE, arXiv 1506.02438, eq. 16",
    hyper=(_GAMMA, _LAM, WHITEN),
    needs=("values",),
    peers={"verl": "gae (always whitened)"},
)
def gae(
    inputs: Inputs, stream: TurnStream, *, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """The returns are those before whitening."""
    assert inputs.values is not None  # `Advantage` checks its `needs`
    values = stream.at(inputs.values)
    advantages = estimate(stream.at(inputs.rewards), values, stream.lengths, gamma, lam)
    return whitened(advantages) if whiten else advantages, advantages + values


@RECURSIONS.entry(
    meaning="GAE with a turn as one step: all tokens of a turn get the turn's advantage",
    formula="r_k = sum of the turn's rewards, V_k = value at its first token; delta_k = r_k + "
    "gamma V_{k+1} - V_k; A_k = delta_k + gamma lam A_{k+1}; returns A_k + V_k; then A = whiten(A)",
    source="GAE, arXiv 1506.02438, eq. 16, on the turns' decision process of StarPO, arXiv "
    "2504.20073",
    hyper=(TURN_GAMMA, _LAM, WHITEN),
    needs=("values", "turn_ids"),
)
def turn_gae(
    inputs: Inputs, stream: TurnStream, *, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """The returns are A_k + V_k at all tokens of the turn, before whitening, which is over
    tokens."""
    assert inputs.values is not None  # `Advantage` checks its `needs`
    values = stream.at(inputs.values)[stream.turn.cumsum(0) - stream.turn]
    advantages = estimate(turn_rewards(inputs, stream), values, stream.num_turns, gamma, lam)
    returns = spread(advantages + values, stream.turn)
    advantages = spread(advantages, stream.turn)
    return whitened(advantages) if whiten else advantages, returns


@RECURSIONS.entry(
    meaning="GAE over turns, then over the tokens of each turn towards the turn's return",
    formula="turns: delta_k = r_k + turn_gamma V_{e(k+1)} - V_{e(k)}, A_k = delta_k + turn_gamma "
    "turn_lam A_{k+1}, e(k) its end; tokens: GAE(gamma, lam) in each turn with reward A_k + "
    "V_{e(k)} at e(k); returns A + V; then A = whiten(A)",
    source="RAGEN, ragen/trainer/core_algos.py (May 2025)",
    hyper=(
        _GAMMA,
        _LAM,
        Hyperparameter("turn_gamma", 0.95, "discount per turn", low=0.0, high=1.0),
        Hyperparameter("turn_lam", 1.0, "lambda of the GAE over turns", low=0.0, high=1.0),
        WHITEN,
    ),
    needs=("values", "turn_ids"),
    peers={
        "RAGEN": "algorithm.bi_level_gae, high_level_gamma; one lam for both levels; "
        "skips turns whose reward is 0"
    },
)
def bi_level_gae(
    inputs: Inputs,
    stream: TurnStream,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
    whiten: bool,
) -> tuple[Tensor, Tensor]:
    """GAE over the turns, whose result is the reward of a second GAE over the tokens of each turn.

    With e(k) the last trained token of turn k, r_k the sum of the turn's rewards, K turns:
    1. delta_k = r_k + turn_gamma V_{e(k+1)} - V_{e(k)}, V_{e(K+1)} = 0;
       B_k = delta_k + turn_gamma turn_lam B_{k+1}.
    2. Within turn k, u_t = B_k + V_{e(k)} at t = e(k), and 0 before;
       delta_t = u_t + gamma V_{t+1} - V_t, where V after e(k) is 0;
       A_t = delta_t + gamma lam A_{t+1}, where A after e(k) is 0.
    Returns A_t + V_t, before A is whitened over all trained tokens.

    As RAGEN's (ragen/trainer/core_algos.py), except that turns are given by their ids, not guessed
    from rewards other than 0, that all rewards of a turn count, and that the two levels have a
    lambda each (RAGEN's: turn_lam = lam).
    """
    assert inputs.values is not None  # `Advantage` checks its `needs`

    values = stream.at(inputs.values)
    last = stream.turn.cumsum(0) - 1
    turn_advantages = estimate(
        turn_rewards(inputs, stream), values[last], stream.num_turns, turn_gamma, turn_lam
    )
    rewards = torch.zeros_like(values)
    rewards[last] = turn_advantages + values[last]
    advantages = estimate(rewards, values, stream.turn, gamma, lam)
    return whitened(advantages) if whiten else advantages, advantages + values


@RECURSIONS.entry(
    meaning="return-to-go against the baseline of least variance for its group and time (optimal "
    "token baseline)",
    formula="w_t = 1 - 2 pi_t + sum_v pi_v^2; W_t = w_1 + ... + w_t; B_t = sum_i G_t W_t / sum_i "
    "W_t over the group's rows that reach t; A_t = G_t - B_t; returns G",
    source="The optimal token baseline, arXiv 2602.07078; verl/trainer/ppo/core_algos.py (TIR "
    "form)",
    hyper=(
        Hyperparameter(
            "handle_zero_tail",
            True,
            "no baseline where only one trajectory of the group is left; it would be its "
            "own return",
        ),
    ),
    needs=("logp", "sum_pi_squared"),
    within_group=True,
    peers={"verl": "tir_optimal_token_baseline; optimal_token_baseline where masks have no holes"},
)
def otb(inputs: Inputs, stream: TurnStream, *, handle_zero_tail: bool) -> tuple[Tensor, Tensor]:
    """G_t = r_t + r_{t+1} + ..., pi = exp(logp); logp and w are bounded to what probabilities allow
    (logp <= 0, 0 <= sum_pi_squared <= 1, w >= 0). Where all W are 0, B_t is the plain mean (verl
    adds 1e-8 to the sum of W, so its B_t is 0). A group of one trajectory gives 0."""
    assert (
        inputs.logp is not None and inputs.sum_pi_squared is not None
    )  # `Advantage` checks its `needs`

    returns = discount_sums(stream.at(inputs.rewards), stream.lengths, 1.0)
    if not returns.numel():
        return returns, returns

    variance = (
        1.0
        - 2.0 * stream.at(inputs.logp).clamp(max=0.0).exp()
        + stream.at(inputs.sum_pi_squared).clamp(0.0, 1.0)
    ).clamp(min=0.0)
    weight = discount_sums(variance.flip(0), stream.lengths.flip(0), 1.0).flip(0)
    time = torch.arange(len(returns), device=returns.device) - spread(
        stream.lengths.cumsum(0) - stream.lengths, stream.lengths
    )
    owner = inputs.trajectory[stream.row]
    group = inputs.members.group[owner]
    cell = Members(group * (int(time.max()) + 1) + time, torch.ones_like(time, dtype=torch.bool))
    total = cell.total(weight)
    if not bool((total > 0.0).all()):
        weight = torch.where(total > 0.0, weight, 1.0)
        total = torch.where(total > 0.0, total, cell.size)

    above = returns + cell.highest(
        -returns
    )  # over the lowest return of the cell, so that equal returns give exactly 0
    advantages = above - divide(cell.total(weight * above), total)
    if handle_zero_tail:
        advantages = torch.where(cell.size == 1.0, returns, advantages)

    return torch.where(inputs.members.size[owner] > 1.0, advantages, 0.0), returns


@RECURSIONS.entry(
    meaning="outcomes and process rewards, each against the mean of the others of its group "
    "(PRIME)",
    formula="A_t = s_i - mean_{j != i} s_j + process_coef sum_{u >= t} gamma^(u - t) (p_u - "
    "mean_{j != i} m_j), p process rewards, m_j their mean over trajectory j; then A = whiten(A)",
    source="PRIME, arXiv 2502.01456, section 3.2; its code whitens",
    hyper=(
        _GAMMA,
        Hyperparameter(
            "process_coef", 1.0, "weight of the process rewards; the outcome has weight 1", low=0.0
        ),
        WHITEN,
    ),
    needs=("process_rewards",),
    within_group=True,
    peers={
        "verl": "recipe/prime: reward_dpo_coef 5, reward_gt_coef 5 (1 : 1); process "
        "rewards scaled by their largest sum"
    },
)
def prime(
    inputs: Inputs, stream: TurnStream, *, gamma: float, process_coef: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """A is 0 in a group of one. Returns A before it is whitened over the batch's trained tokens."""
    assert inputs.process_rewards is not None  # `Advantage` checks its `needs`

    rewards = stream.at(inputs.process_rewards)
    owner = inputs.trajectory[stream.row]
    mean = divide(
        torch.zeros_like(inputs.score).index_add_(0, owner, rewards), inputs.length.clamp(min=1.0)
    )

    size = inputs.members.size
    mean_of_others = divide(inputs.members.total(mean) - mean, (size - 1.0).clamp(min=1.0))
    running = discount_sums(rewards - mean_of_others[owner], stream.lengths, gamma)
    advantages = torch.where(size[owner] > 1.0, rloo(inputs)[owner] + process_coef * running, 0.0)
    return whitened(advantages) if whiten else advantages, advantages
