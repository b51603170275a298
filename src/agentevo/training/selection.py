"""Which trajectories of a step are trained on, and why each of the others is not."""

from __future__ import annotations

from collections.abc import Sequence

from agentevo.algorithms.filters import Kept, overlong, starpo_s
from agentevo.config import AlgorithmSection
from agentevo.types import Trajectory


def select(trajectories: Sequence[Trajectory], section: AlgorithmSection) -> tuple[list[Trajectory], dict[str, str]]:
    """Those to train on, in order, and the reason for each that is dropped (trajectory id -> reason).

    Failed trajectories take no part, not even in their group's mean.
    """
    dropped = {t.id: "failed" for t in trajectories if t.status == "failed"}
    dropped |= {t.id: "no-tokens" for t in trajectories if t.status == "completed" and not t.num_completion_tokens()}
    kept = [t for t in trajectories if t.id not in dropped]
    if section.drop_truncated:
        kept = _filtered(kept, overlong([t.truncated for t in kept]), "truncated", dropped)
    if section.keep_groups < 1:
        filtered = starpo_s([t.reward for t in kept], [t.group_id for t in kept], keep=section.keep_groups)
        kept = _filtered(kept, filtered, "small-spread", dropped)
    if section.within_group:
        kept = _with_others(kept, dropped, drop_zero_variance=section.drop_zero_variance)
    return kept, dropped


def _filtered(trajectories: Sequence[Trajectory], filtered: Kept, reason: str, dropped: dict[str, str]) -> list[Trajectory]:
    dropped |= {trajectories[position].id: reason for position in filtered.dropped}
    return [trajectories[position] for position in filtered.kept]


def _with_others(trajectories: Sequence[Trajectory], dropped: dict[str, str], *, drop_zero_variance: bool) -> list[Trajectory]:
    """Those that have another one to be compared with."""
    rewards: dict[str, list[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.group_id, []).append(t.reward)
    kept = []
    for t in trajectories:
        if len(rewards[t.group_id]) == 1:
            dropped[t.id] = "group-of-one"
        elif drop_zero_variance and len(set(rewards[t.group_id])) == 1:
            dropped[t.id] = "zero-variance"
        else:
            kept.append(t)
    return kept
