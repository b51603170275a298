"""Estimators that give each trajectory one number: its score against the scores of its group or of
the batch.

An estimator takes the validated inputs and returns [N] float64, one number per trajectory.
`estimators.Advantage` assigns this number to the trajectory's trained tokens. In the formulas, s_i
is the score of trajectory i (the sum of its rewards at trained tokens), mu_g and std_g are the mean
and the unbiased standard deviation of the scores of its group, and n is the number of trajectories
in the group. For all estimators:

- A trajectory without a trained token has no score. Means and counts ignore it, and it gets 0.
- A group of one has advantage 0 (except under `raw`, which has no baseline).
- Scores that differ only by rounding count as equal (equality.py). Equal scores give exactly 0, and
  not rounding noise divided by epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from agentevo.algorithms.entries import AlgorithmEntry, EntryTable, Hyperparameter
from agentevo.algorithms.lazy_torch import torch
from agentevo.types.equality import EQUAL

if TYPE_CHECKING:
    from torch import Tensor

    from agentevo.algorithms.advantage_inputs import Inputs

WHITEN_EPSILON = 1e-8
"""Added to the variance in `whiten`, as in verl and TRL."""
MAX_MAGNITUDE = 1e100
"""The largest magnitude of an input, so that its square and sums are finite in float64."""

EPSILON = Hyperparameter("epsilon", 1e-6, "added to the divisor", low=0.0, high=0.01)
SCALE_BY_STD = Hyperparameter("scale_by_std", True, "divide by the standard deviation of the group")
WHITEN = Hyperparameter(
    "whiten",
    True,
    "shift and scale the advantages of the batch's trained tokens to mean 0 and variance 1",
)


@dataclass(frozen=True, kw_only=True)
class AdvantageEntry(AlgorithmEntry):
    """The entry of an advantage estimator."""

    within_group: bool = False
    """Whether the estimator compares a trajectory with others of its group, and gives 0 if there
    are none."""


SCORES = EntryTable("advantage", AdvantageEntry)
"""Estimators that give each trajectory one number, (inputs, **hyper) -> [N]."""


@dataclass(frozen=True)
class Members:
    """N members (trajectories, or turns) of groups: `group` [N] int64, `counts` [N] bool.
    Statistics ignore members whose `counts` is False."""

    group: Tensor
    counts: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over the group of each member. [N]"""
        sums = values.new_zeros(self._num_groups).index_add_(
            0, self.group, self._mask_uncounted(values, 0.0)
        )
        return sums[self.group]

    def highest(self, values: Tensor) -> Tensor:
        """Largest of `values` [N] in the group of each member; -inf in a group without counted
        members. [N]"""
        largest = values.new_full((self._num_groups,), -torch.inf)
        largest.scatter_reduce_(0, self.group, self._mask_uncounted(values, -torch.inf), "amax")
        return largest[self.group]

    def _mask_uncounted(self, values: Tensor, fill: float) -> Tensor:
        return values if self._all_count else torch.where(self.counts, values, fill)

    @cached_property
    def _all_count(self) -> bool:
        return bool(self.counts.all())

    @cached_property
    def size(self) -> Tensor:
        """The number of counted members in the group of each member. [N] float64"""
        return self.total(
            torch.ones(self.group.shape, dtype=torch.float64, device=self.group.device)
        )

    @cached_property
    def _num_groups(self) -> int:
        return int(self.group.max()) + 1 if self.group.numel() else 0

    def is_unequal(self, values: Tensor) -> Tensor:
        """Whether a member counts and the `values` [N] of its group are not all equal. [N] bool"""
        spread = self.highest(values) + self.highest(-values)
        return self.counts & (spread > EQUAL * self.highest(values.abs()))

    def subtract_mean(self, values: Tensor) -> Tensor:
        """`values` [N] minus the mean of their group; exactly 0 if the group's values are equal.
        [N]"""
        return torch.where(
            self.is_unequal(values), values - self.total(values) / self.size.clamp(min=1.0), 0.0
        )

    def normalise(self, values: Tensor, *, scale_by_std: bool, epsilon: float) -> Tensor:
        """(values - mean) / (std + epsilon) within groups, std unbiased. No division if
        `scale_by_std` is false. [N]"""
        centred = self.subtract_mean(values)
        return divide(centred, self.std(centred) + epsilon) if scale_by_std else centred

    def std(self, centred: Tensor) -> Tensor:
        """Unbiased standard deviation of each member's group, from centred values [N]; 0 in a group
        of one. [N]"""
        return (self.total(centred.square()) / (self.size - 1.0).clamp(min=1.0)).sqrt()


def divide(values: Tensor, divisor: Tensor) -> Tensor:
    """values / divisor, and 0 if the divisor is not positive."""
    return torch.where(divisor > 0.0, values / torch.where(divisor > 0.0, divisor, 1.0), 0.0)


def whiten(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8), variance unbiased; `weights` is the number of tokens
    that each value represents. Same shape.

    Equal values, and fewer than two tokens, give exactly 0. Statistics ignore values of weight 0.
    """
    counted_values = values if weights is None else values[weights > 0.0]
    total = float(values.numel() if weights is None else weights.sum())
    if total < 2.0 or not bool(
        counted_values.max() - counted_values.min() > EQUAL * counted_values.abs().max()
    ):
        return torch.zeros_like(values)

    weights = values.new_ones(()) if weights is None else weights
    centred = values - (weights * values).sum() / total
    return centred * torch.rsqrt(
        (weights * centred.square()).sum() / (total - 1.0) + WHITEN_EPSILON
    )


@SCORES.entry(
    meaning="the trajectory's score, without a baseline (ARPO)",
    formula="A_i = s_i",
    source="REINFORCE, Williams 1992; as ARPO in RAGEN's StarPO code, arXiv 2504.20073",
    peers={"RAGEN": "reward_norm_type arpo (March 2025); state + identity later"},
)
def raw(inputs: Inputs) -> Tensor:
    return inputs.score


@SCORES.entry(
    meaning="scores normalised over all trajectories of the batch (BRPO)",
    formula="A_i = (s_i - mean) / (std + epsilon), over the batch; a batch of one gives 0",
    source="BRPO in RAGEN's StarPO code, arXiv 2504.20073",
    hyper=(EPSILON,),
    peers={"RAGEN": "reward_norm_type brpo, put before GAE; a batch of one keeps its raw reward"},
)
def batch_norm(inputs: Inputs, *, epsilon: float) -> Tensor:
    """The std is unbiased."""
    batch_members = Members(torch.zeros_like(inputs.members.group), inputs.members.counts)
    return batch_members.normalise(inputs.score, scale_by_std=True, epsilon=epsilon)


@SCORES.entry(
    meaning="score against the mean of its group, in units of the group's spread",
    formula="A_i = (s_i - mu_g) / (std_g + epsilon); scale_by_std=false: A_i = s_i - mu_g (Dr. "
    "GRPO)",
    source="DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783",
    hyper=(SCALE_BY_STD, EPSILON),
    within_group=True,
    peers={
        "verl": "grpo, grpo_vectorized; scale_by_std is norm_adv_by_std_in_grpo",
        "TRL": 'GRPOTrainer, scale_rewards="group" or "none"',
    },
)
def grpo(inputs: Inputs, *, scale_by_std: bool, epsilon: float) -> Tensor:
    """The std_g is unbiased, as in TRL and verl."""
    return inputs.members.normalise(inputs.score, scale_by_std=scale_by_std, epsilon=epsilon)


@SCORES.entry(
    meaning="only the best of a group is reinforced, by its lead over the second best",
    formula="A_best = (s_best - s_second) / (std_g + epsilon), all others 0; a tie for the best "
    "gives 0",
    source="arXiv 2503.19595 (policy optimisation for inference-time objectives)",
    hyper=(SCALE_BY_STD, EPSILON),
    within_group=True,
    peers={"verl": "grpo_passk"},
)
def grpo_passk(inputs: Inputs, *, scale_by_std: bool, epsilon: float) -> Tensor:
    members = inputs.members
    score = inputs.score
    best = members.highest(score)
    tolerance = EQUAL * members.highest(score.abs())
    is_best = members.counts & (best - score <= tolerance)
    runners_up = Members(members.group, members.counts & ~is_best)
    has_single_best = members.total(is_best.double()) == 1.0
    lead = torch.where(
        is_best & has_single_best & members.is_unequal(score) & (runners_up.size > 0.0),
        best - runners_up.highest(score),
        0.0,
    )
    return (
        divide(lead, members.std(members.subtract_mean(score)) + epsilon) if scale_by_std else lead
    )


@SCORES.entry(
    meaning="score against the mean of the other trajectories of its group",
    formula="A_i = n / (n - 1) (s_i - mu_g) = s_i - mean of the others",
    source="Back to basics, arXiv 2402.14740; Kool et al. 2019",
    within_group=True,
    peers={"verl": "rloo, rloo_vectorized", "TRL": "RLOOTrainer"},
)
def rloo(inputs: Inputs) -> Tensor:
    size = inputs.members.size
    return size / (size - 1.0).clamp(min=1.0) * inputs.members.subtract_mean(inputs.score)


@SCORES.entry(
    meaning="score against the mean of its group weighted by length, near the baseline of least "
    "variance",
    formula="A_i = s_i - sum_j(l_j s_j) / sum_j(l_j), l_j = trained tokens of trajectory j",
    source="OPO, arXiv 2505.23585",
    within_group=True,
    peers={"verl": "opo"},
)
def opo(inputs: Inputs) -> Tensor:
    members = inputs.members
    score = inputs.score
    baseline = members.total(inputs.length * score) / members.total(inputs.length).clamp(min=1.0)
    return torch.where(members.is_unequal(score), score - baseline, 0.0)


@SCORES.entry(
    meaning="score against the mean of its group, scaled up to make up for groups whose scores "
    "are all equal",
    formula="A_i = alpha (s_i - mu_g), alpha = trajectories / trajectories in groups whose scores "
    "differ",
    source="GPG, arXiv 2504.02546",
    within_group=True,
    peers={"verl": "gpg"},
)
def gpg(inputs: Inputs) -> Tensor:
    """A group of one counts as a group with equal scores."""
    num_unequal = inputs.members.is_unequal(inputs.score).sum().double().clamp(min=1.0)
    return inputs.members.counts.sum() / num_unequal * inputs.members.subtract_mean(inputs.score)


@SCORES.entry(
    meaning="score against the mean of its group in units of that mean: hard tasks weigh more",
    formula="A_i = (s_i - mu_g) / (mu_g + epsilon), scores of at least 0; 0 where mu_g is 0",
    source="Maximum likelihood reinforcement learning, arXiv 2602.02710",
    hyper=(EPSILON,),
    within_group=True,
    peers={"prime-rl": "max_rl"},
)
def maxrl(inputs: Inputs, *, epsilon: float) -> Tensor:
    """Raises ValueError for a negative score."""
    score = inputs.score
    if bool((score < 0.0).any()):
        raise ValueError(
            f"maxrl: the score of {inputs.trajectory_name(int(score.argmin()))} is "
            f"{float(score.min()):g}, but the formula is for scores "
            "of at least 0: add a constant to the rewards, or choose grpo"
        )

    return divide(
        inputs.members.subtract_mean(score),
        inputs.members.total(score) / inputs.members.size.clamp(min=1.0) + epsilon,
    )


@SCORES.entry(
    meaning="each reward normalised within its group before they are added, so that none dominates",
    formula="A_i = whiten(sum_r w_r (s_ri - mu_rg) / (std_rg + epsilon)), whitened over the "
    "batch's trained tokens; w_r default 1",
    source="GDPO, arXiv 2601.05242",
    hyper=(EPSILON, WHITEN),
    needs=("reward_parts",),
    within_group=True,
    peers={
        "verl": "gdpo, with gdpo_reward_keys and gdpo_reward_weights",
        "TRL": 'multi_objective_aggregation="normalize_then_sum"',
    },
)
def gdpo(inputs: Inputs, *, epsilon: float, whiten: bool) -> Tensor:
    """The whitening leaves out groups of one."""
    assert (
        inputs.reward_parts is not None and inputs.reward_weights is not None
    )  # `Advantage` checks its `needs`
    total = torch.zeros_like(inputs.score)
    for part, weight in zip(inputs.reward_parts, inputs.reward_weights, strict=True):
        total += weight * inputs.members.normalise(part, scale_by_std=True, epsilon=epsilon)
    return _whiten_in_groups(inputs, total) if whiten else total


@SCORES.entry(
    meaning="score against the mean of its group, whitened over the batch instead of the group",
    formula="A_i = whiten(s_i - mu_g), over the batch's trained tokens; groups of one are left "
    "out and get 0",
    source="REINFORCE++, arXiv 2501.03262, baseline variant",
    within_group=True,
    peers={"verl": "reinforce_plus_plus_baseline"},
)
def reinforce_pp_baseline(inputs: Inputs) -> Tensor:
    """The whitening weighs a trajectory by its length."""
    return _whiten_in_groups(inputs, inputs.members.subtract_mean(inputs.score))


def _whiten_in_groups(inputs: Inputs, values: Tensor) -> Tensor:
    has_others = inputs.members.size > 1.0
    return torch.where(has_others, whiten(values, torch.where(has_others, inputs.length, 0.0)), 0.0)
