"""Filters that choose the trajectories of a batch that are worth training on. No torch.

Inputs are plain sequences with one entry per trajectory: its reward, and the id of its group
(attempts at the same task; members may be anywhere). Every filter returns the positions that it
keeps, in order; it keeps or drops a group as a whole. Filters use the rewards as the environment
gave them, before any normalisation (a normalised group always has the same spread); rewards that
differ only by rounding are equal (equality.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from agentevo.types.equality import EQUAL, are_equal, levels


def _groups(group_ids: Sequence[Hashable]) -> list[list[int]]:
    """The positions of each group's members; groups are in the order in which they first appear."""
    groups: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_ids):
        groups.setdefault(group, []).append(position)
    return list(groups.values())


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


def dynamic_sampling(
    rewards: Sequence[float], group_ids: Sequence[Hashable], *, wanted: int
) -> list[int]:
    """DAPO's choice among all groups that a step has sampled so far: the first `wanted` informative
    ones.

    The caller samples again while there are fewer, and bounds the rounds. Source: arXiv 2503.14476,
    section 3.2.
    """
    informative = [
        members
        for members in _groups(group_ids)
        if is_informative([rewards[member] for member in members])
    ]
    return sorted(member for members in informative[:wanted] for member in members)


def starpo_s(rewards: Sequence[float], group_ids: Sequence[Hashable], *, keep: float) -> list[int]:
    """Keeps the share `keep` of the groups, above 0 and at most 1: those whose rewards have the
    highest standard deviation. Their number is rounded down, but is at least 1.

    Among groups with the same deviation the earlier ones are kept; the deviation of a group of one
    is 0. Source: RAGEN's StarPO-S, arXiv 2504.20073.
    """
    groups = _groups(group_ids)
    num_kept = max(1, math.floor(keep * len(groups) + 1e-9))  # 0.29 * 100 is 28.999999999999996
    level = levels([reward_std([rewards[member] for member in members]) for members in groups])
    ranking = sorted(range(len(groups)), key=lambda index: -level[index])  # stable
    return sorted(member for index in ranking[:num_kept] for member in groups[index])


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

    def filter(self, rewards: Sequence[float], group_ids: Sequence[Hashable]) -> list[int]:
        threshold = self.threshold
        kept: list[int] = []
        spreads = []
        for members in _groups(group_ids):
            std = reward_std([rewards[member] for member in members])
            if len(members) > 1:
                spreads.append(std)
            if threshold is None or threshold - std <= EQUAL * threshold:
                kept += members

        self._total += math.fsum(spreads)
        self._count += len(spreads)
        return sorted(kept)

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
