"""Filters that choose the trajectories of a batch that are worth training on. No torch.

Inputs are plain sequences with one entry per trajectory: its reward, and the id of its group
(attempts at the same task; members may be anywhere). Every filter returns a `FilterResult`: the
positions that it keeps, and its reason for dropping each of the others. Filters use the rewards as
the environment gave them, before any normalisation (a normalised group always has the same spread);
rewards that differ only by rounding are equal (equality.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from agentevo.algorithms.equality import EQUAL, are_equal, levels


@dataclass(frozen=True)
class FilterResult:
    """The positions that a filter keeps, in order, and the reason why it drops each of the others.
    Every position is in exactly one of the two."""

    kept_positions: tuple[int, ...]
    dropped: Mapping[int, str]


def _groups(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each group's members; groups are in the order in which they first appear.
    Raises ValueError."""
    if len(rewards) != len(group_ids):
        raise ValueError(
            f"{len(rewards)} rewards but {len(group_ids)} group ids: give one of each per "
            "trajectory"
        )

    wrong = next(
        (position for position, reward in enumerate(rewards) if not math.isfinite(reward)), None
    )
    if wrong is not None:
        raise ValueError(
            f"reward {wrong} is {rewards[wrong]}: a filter needs finite rewards; drop failed "
            "attempts first"
        )

    groups: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_ids):
        groups.setdefault(group, []).append(position)

    return groups


def _kept(count: int, reasons: Mapping[int, str]) -> FilterResult:
    return FilterResult(
        tuple(position for position in range(count) if position not in reasons),
        {p: reasons[p] for p in sorted(reasons)},
    )


def reward_std(rewards: Sequence[float]) -> float:
    """The unbiased standard deviation (n - 1) of rewards. It is exactly 0 for equal rewards and for
    a single one, and does not depend on their order."""
    if len(rewards) < 2 or are_equal(rewards):
        return 0.0
    scale = max(abs(reward) for reward in rewards)  # squares neither overflow nor vanish
    mean = math.fsum(reward / scale for reward in rewards) / len(rewards)
    return scale * math.sqrt(
        math.fsum((reward / scale - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    )


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ. This is DAPO's condition 0 < correct < G (arXiv
    2503.14476, eq. 11) for rewards of any kind. The rewards of a group of one do not differ: its
    advantage under a group baseline is 0 (verl keeps groups of one)."""
    return len(rewards) > 1 and not are_equal(rewards)


def _uninformative(rewards: Sequence[float]) -> str | None:
    if is_informative(rewards):
        return None
    return "group of one" if len(rewards) == 1 else "all rewards of the group are equal"


def dynamic_sampling(
    rewards: Sequence[float], group_ids: Sequence[Hashable], *, wanted: int
) -> tuple[FilterResult, int]:
    """DAPO's choice among all groups that a step has sampled so far: the first `wanted` informative
    ones, and the number of groups that are still missing.

    The caller samples again while that number is above 0, and bounds the rounds. Informative groups
    beyond `wanted` are dropped as surplus. Source: arXiv 2503.14476, section 3.2.
    """
    if wanted < 1:
        raise ValueError(
            f"dynamic sampling: wanted={wanted} is not possible: give a number of groups, at "
            "least 1"
        )

    reasons: dict[int, str] = {}
    num_informative = 0
    for members in _groups(rewards, group_ids).values():
        reason = _uninformative([rewards[member] for member in members])
        if reason is None:
            num_informative += 1
            reason = "surplus: the batch is full" if num_informative > wanted else None
        if reason:
            reasons |= dict.fromkeys(members, reason)

    return _kept(len(rewards), reasons), max(wanted - num_informative, 0)


def starpo_s(
    rewards: Sequence[float], group_ids: Sequence[Hashable], *, keep: float = 0.25
) -> FilterResult:
    """Keeps the share `keep` of the groups: those whose rewards have the highest standard
    deviation. Their number is rounded down, but is at least 1.

    Among groups with the same deviation the earlier ones are kept; the deviation of a group of one
    is 0. Source: RAGEN's StarPO-S, arXiv 2504.20073.
    """
    if not 0.0 < keep <= 1.0:
        raise ValueError(
            f"starpo_s: keep={keep} is not possible: give a share of the groups, above 0 and at "
            "most 1"
        )

    groups = list(_groups(rewards, group_ids).values())
    if not groups:
        return FilterResult((), {})

    num_kept = max(1, math.floor(keep * len(groups) + 1e-9))  # 0.29 * 100 is 28.999999999999996
    spread = [reward_std([rewards[member] for member in members]) for members in groups]
    level = levels(spread)
    ranking = sorted(range(len(groups)), key=lambda index: -level[index])  # stable
    reasons: dict[int, str] = {}
    for index in ranking[num_kept:]:
        reasons |= dict.fromkeys(
            groups[index],
            f"reward std {spread[index]:.4g} not among the top {num_kept} of {len(groups)} groups",
        )

    return _kept(len(rewards), reasons)


def overlong(truncated: Sequence[bool]) -> FilterResult:
    """Drops attempts that were cut off at a length limit, because their reward says little
    (overlong filtering of DAPO, arXiv 2503.14476, 3.4)."""
    return _kept(
        len(truncated), {position: "truncated" for position, cut in enumerate(truncated) if cut}
    )


class RLPRStd:
    """Keeps the groups whose reward std is at least `beta` times the running mean of all groups'
    std (RLPR, arXiv 2506.18254).

    Steps before `record_from` change nothing. From there to `start` the mean std of each step is
    recorded, and at `start` the running mean m begins as the mean of the recorded values (later if
    there are none yet). After that, m <- decay m + (1 - decay) (mean std of the step before), where
    the mean includes the dropped groups. A group of one has std 0 and does not count towards m. A
    step that refills its batch may call `filter` several times: m changes only at `end_step`.
    `state_dict` holds all that is needed to resume.
    """

    def __init__(
        self, *, beta: float = 0.5, decay: float = 0.99, record_from: int = 6, start: int = 11
    ) -> None:
        if not (beta >= 0 and math.isfinite(beta)):
            raise ValueError(f"rlpr_std: beta={beta} is not possible: give a number at least 0")
        if not 0 <= decay <= 1:
            raise ValueError(f"rlpr_std: decay={decay} is not possible: give a number from 0 to 1")

        if not 1 <= record_from < start:
            raise ValueError(
                f"rlpr_std: record_from={record_from} is not possible: give a step number, at "
                f"least 1 and below start={start}"
            )

        self.beta = beta
        self.decay = decay
        self.record_from = record_from
        self.start = start
        self._step = 1
        self._mean: float | None = None
        self._recorded: list[float] = []
        self._total = 0.0
        self._count = 0

    @property
    def threshold(self) -> float | None:
        """The smallest std that the current step keeps; None while it keeps every group."""
        return None if self._mean is None else self.beta * self._mean

    def filter(self, rewards: Sequence[float], group_ids: Sequence[Hashable]) -> FilterResult:
        reasons: dict[int, str] = {}
        threshold = self.threshold
        spreads = []
        for members in _groups(rewards, group_ids).values():
            std = reward_std([rewards[member] for member in members])
            if len(members) > 1:
                spreads.append(std)
            if threshold is not None and threshold - std > EQUAL * threshold:
                reasons |= dict.fromkeys(members, f"reward std {std:.4g} below {threshold:.4g}")

        self._total += math.fsum(spreads)
        self._count += len(spreads)
        return _kept(len(rewards), reasons)

    def end_step(self) -> None:
        """Ends the step: adds its mean std to the running mean, and begins the next step."""
        if self._count and self._step >= self.record_from:
            mean = self._total / self._count
            if self._mean is None:
                self._recorded.append(mean)
            else:
                self._mean = self.decay * self._mean + (1.0 - self.decay) * mean

        self._step += 1
        self._total = 0.0
        self._count = 0

        if self._mean is None and self._step >= self.start and self._recorded:
            self._mean = math.fsum(self._recorded) / len(self._recorded)
            self._recorded = []

    def state_dict(self) -> dict[str, object]:
        return {
            "step": self._step,
            "mean": self._mean,
            "recorded": list(self._recorded),
            "total": self._total,
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what `state_dict` returned. Raises ValueError if an entry is missing or has the
        wrong type."""
        step, mean, recorded, total, count = (
            state.get(key) for key in ("step", "mean", "recorded", "total", "count")
        )
        if not (
            isinstance(step, int)
            and isinstance(count, int)
            and isinstance(total, (int, float))
            and isinstance(recorded, list)
        ):
            raise ValueError(f"rlpr_std: this is not a state of the filter: {dict(state)!r}")

        if mean is not None and not isinstance(mean, (int, float)):
            raise ValueError(f"rlpr_std: mean={mean!r} in the state is not a number")

        self._step = step
        self._count = count
        self._total = float(total)
        self._recorded = [float(item) for item in recorded]
        self._mean = None if mean is None else float(mean)
