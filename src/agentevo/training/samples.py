"""From trajectories to training samples: one per leaf of the turn tree, each chosen token trained exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentevo.algorithms.advantages import grpo
from agentevo.config import AlgorithmSection
from agentevo.types import Sample, Trajectory, Turn


def make_samples(trajectories: Sequence[Trajectory], section: AlgorithmSection) -> tuple[list[Sample], dict[str, str]]:
    """Samples with their advantages, and why each trajectory that gave none was dropped (trajectory id -> reason).

    Failed trajectories take no part, not even in their group's mean.
    """
    dropped = {t.id: "failed" for t in trajectories if t.status == "failed"}
    dropped |= {t.id: "no-tokens" for t in trajectories if t.status == "completed" and not t.num_completion_tokens()}
    kept = [t for t in trajectories if t.id not in dropped]
    rewards = torch.tensor([t.reward for t in kept], dtype=torch.float64)
    advantages = grpo(rewards, [t.group_id for t in kept], scale_by_std=section.scale_by_std).tolist()
    sizes: dict[str, int] = {}
    spread: set[str] = set()
    first: dict[str, float] = {}
    for t in kept:
        sizes[t.group_id] = sizes.get(t.group_id, 0) + 1
        if first.setdefault(t.group_id, t.reward) != t.reward:
            spread.add(t.group_id)
    samples = []
    for trajectory, advantage in zip(kept, advantages, strict=True):
        if sizes[trajectory.group_id] == 1:
            dropped[trajectory.id] = "group-of-one"
        elif section.drop_zero_variance and trajectory.group_id not in spread:
            dropped[trajectory.id] = "zero-variance"
        else:
            samples.extend(trajectory_samples(trajectory, advantage))
    return samples, dropped


def trajectory_samples(trajectory: Trajectory, advantage: float) -> list[Sample]:
    """One sample per root-to-leaf path. A turn on several paths is trained in the first one only; in the others it is context."""
    parents = {turn.parent for turn in trajectory.turns}
    trained: set[int] = set()
    samples = []
    for leaf in trajectory.turns:
        if leaf.index in parents:
            continue
        path = [leaf]
        while path[0].parent is not None:
            path.insert(0, trajectory.turns[path[0].parent])
        samples.append(_path_sample(trajectory, path, advantage, trained))
        trained.update(turn.index for turn in path)
    return samples


def _path_sample(trajectory: Trajectory, path: list[Turn], advantage: float, trained: set[int]) -> Sample:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in path:
        size, fresh = len(turn.prompt_ids), turn.index not in trained
        count = len(turn.completion_ids)
        ids += [*turn.prompt_ids, *turn.completion_ids]
        mask += [False] * size + [fresh] * count
        logprobs += [0.0] * size + (turn.logprobs if fresh else [0.0] * count)
        versions += [-1] * size + (turn.versions if fresh else [-1] * count)
    return Sample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        advantages=[advantage if m else 0.0 for m in mask],
        temperature=path[0].temperature,
    )
