"""Chooses a step's trajectories to train on, with a reason for each of the others. Filters use the
rewards before any shaping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentevo.algorithms.filters import dynamic_sampling, is_informative, starpo_s
from agentevo.config import AlgorithmSection
from agentevo.types import Trajectory

Selection = tuple[list[Trajectory], dict[str, str]]
"""The trajectories that are trained on, in order, and why each of the others is not (id ->
reason)."""


def usable(trajectories: Sequence[Trajectory], section: AlgorithmSection) -> Selection:
    """Leaves out trajectories that can't be trained on, whatever their group. Failed and cancelled
    ones do not count in their group's mean."""
    dropped: dict[str, str] = {t.id: t.status for t in trajectories if t.status != "completed"}
    dropped |= {
        t.id: "no-tokens"
        for t in trajectories
        if t.status == "completed" and not t.num_trainable_tokens()
    }
    remaining = [t for t in trajectories if t.id not in dropped]
    if section.drop_truncated:
        dropped |= {t.id: "truncated" for t in remaining if t.truncated}
        remaining = [t for t in remaining if not t.truncated]

    return remaining, dropped


def select(
    trajectories: Sequence[Trajectory],
    section: AlgorithmSection,
    *,
    before: Mapping[str, str] | None = None,
    num_groups: int | None = None,
    needs_others: bool = True,
) -> Selection:
    """Selects the trajectories to train on. `before`: trajectories that were dropped earlier, with
    their reasons.

    With `num_groups` it selects this many groups, the first ones whose rewards differ (dynamic
    sampling). Otherwise it selects the share `keep_groups` of the groups and, if the advantage
    compares within groups, only groups with different rewards. `needs_others=False`: an attempt
    also teaches without a comparison, so equal rewards drop none.
    """
    before = before or {}
    remaining, dropped = usable([t for t in trajectories if t.id not in before], section)
    dropped |= before
    if num_groups is not None:
        return _full_batch(remaining, dropped, num_groups), dropped

    if section.keep_groups < 1:
        kept = starpo_s(
            [t.reward for t in remaining], [t.group_id for t in remaining], keep=section.keep_groups
        )
        small = sorted(set(range(len(remaining))) - set(kept))
        dropped |= {remaining[position].id: "small-spread" for position in small}
        remaining = [remaining[position] for position in kept]

    if section.within_group and needs_others:
        remaining = _with_others(remaining, dropped, drop_zero_variance=section.drop_zero_variance)

    return remaining, dropped


def rewards_by_group(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Group id -> rewards of its members, in order."""
    rewards: dict[str, list[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.group_id, []).append(t.reward)
    return rewards


def _full_batch(
    trajectories: Sequence[Trajectory], dropped: dict[str, str], num_groups: int
) -> list[Trajectory]:
    """The first `num_groups` groups whose rewards differ."""
    kept = dynamic_sampling(
        [t.reward for t in trajectories], [t.group_id for t in trajectories], wanted=num_groups
    )
    rewards = rewards_by_group(trajectories)
    for position in sorted(set(range(len(trajectories))) - set(kept)):
        group = rewards[trajectories[position].group_id]
        reason = "group-of-one" if len(group) == 1 else "zero-variance"
        dropped[trajectories[position].id] = "surplus" if is_informative(group) else reason

    return [trajectories[position] for position in kept]


def _with_others(
    trajectories: Sequence[Trajectory], dropped: dict[str, str], *, drop_zero_variance: bool
) -> list[Trajectory]:
    """The trajectories whose group has at least one other trajectory."""
    rewards = rewards_by_group(trajectories)
    comparable = []
    for t in trajectories:
        if len(rewards[t.group_id]) == 1:
            dropped[t.id] = "group-of-one"
        elif drop_zero_variance and not is_informative(rewards[t.group_id]):
            dropped[t.id] = "zero-variance"
        else:
            comparable.append(t)

    return comparable
