"""From trajectories to training samples: one per leaf of the turn tree, each chosen token trained exactly once, each with its advantage.

An advantage that is one number per attempt is made from the attempt's reward. One that runs along tokens or turns gets each turn's reward
at the turn's last token; what the attempt earned beside its turns' rewards is paid at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from agentevo.algorithms.estimators import RECURSIONS, advantage
from agentevo.catalogue.presets import Algorithm
from agentevo.config import AlgorithmSection
from agentevo.types import Sample, Trajectory, Turn


class Row(NamedTuple):
    """A sample that still lacks its advantages."""

    trajectory: Trajectory
    sample: Sample
    turns: list[int]
    """The turn of each of its trained tokens."""


def make_samples(trajectories: Sequence[Trajectory], section: AlgorithmSection) -> list[Sample]:
    """Samples with their advantages, of trajectories that `selection.select` kept."""
    rows = [row for trajectory in trajectories for row in trajectory_rows(trajectory)]
    return _with_advantages(rows, section.settled()) if rows else []


def _with_advantages(rows: Sequence[Row], algorithm: Algorithm) -> list[Sample]:
    width = max(len(turns) for _, _, turns in rows)
    rewards = torch.zeros(len(rows), width, dtype=torch.float64)
    turn_ids = torch.full((len(rows), width), -1, dtype=torch.int64)
    last_row = {trajectory.id: index for index, (trajectory, _, turns) in enumerate(rows) if turns}
    per_turn = algorithm.advantage in RECURSIONS
    for index, (trajectory, _, turns) in enumerate(rows):
        turn_ids[index, : len(turns)] = torch.tensor(turns, dtype=torch.int64)
        if per_turn:
            for place, turn in enumerate(turns):
                if place + 1 == len(turns) or turns[place + 1] != turn:
                    rewards[index, place] += trajectory.turns[turn].reward
        if last_row.get(trajectory.id) == index:
            paid = sum(turn.reward for turn in trajectory.turns) if per_turn else 0.0
            rewards[index, len(turns) - 1] += trajectory.reward - paid
    advantages, _ = advantage(
        algorithm.advantage,
        token_rewards=rewards,
        mask=turn_ids >= 0,
        group_ids=[trajectory.group_id for trajectory, _, _ in rows],
        trajectory_ids=[trajectory.id for trajectory, _, _ in rows],
        turn_ids=turn_ids,
        **algorithm.advantage_hyper,
    )
    samples = []
    for (_, sample, _), row in zip(rows, advantages.tolist(), strict=True):
        of_token = iter(row)
        samples.append(msgspec.structs.replace(sample, advantages=[next(of_token) if m else 0.0 for m in sample.loss_mask]))
    return samples


def trajectory_rows(trajectory: Trajectory) -> list[Row]:
    """One row per root-to-leaf path. A turn on several paths is trained in the first one only; in the others it is context."""
    parents = {turn.parent for turn in trajectory.turns}
    trained: set[int] = set()
    rows = []
    for leaf in trajectory.turns:
        if leaf.index in parents:
            continue
        path = [leaf]
        while path[0].parent is not None:
            path.insert(0, trajectory.turns[path[0].parent])
        rows.append(_path_row(trajectory, path, trained))
        trained.update(turn.index for turn in path)
    return rows


def _path_row(trajectory: Trajectory, path: list[Turn], trained: set[int]) -> Row:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[int] = []
    for turn in path:
        size, fresh = len(turn.prompt_ids), turn.index not in trained
        count = len(turn.completion_ids)
        ids += [*turn.prompt_ids, *turn.completion_ids]
        mask += [False] * size + [fresh] * count
        logprobs += [0.0] * size + (turn.logprobs if fresh else [0.0] * count)
        versions += [-1] * size + (turn.versions if fresh else [-1] * count)
        turns += [turn.index] * count if fresh else []
    sample = Sample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        advantages=[0.0] * len(ids),
        temperature=path[0].temperature,
    )
    return Row(trajectory, sample, turns)
