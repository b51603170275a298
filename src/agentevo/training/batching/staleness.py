"""Computes the age of a step's tokens, and keeps tokens that are older than the bound out of
training.

    age of a token = trainer_version - version of the weights that sampled it
    a token is trained  <=>  its age <= bound

A trainer at version v has committed v steps; its next step is trained at v. Advantages are computed
before stale tokens are masked, from all attempts and all their tokens: a token that is too old
loses its gradient, but it still counts in the group's baseline. A token newer than the trainer can
only come from a trainer that was killed before it committed a version that the engines already had.
It raises TrainingError. All functions are pure functions of samples and trajectories.
docs/asynchronous.md has the formulas of all metrics. Replayed successes of earlier steps have a
bound of their own, which was kept when they were chosen (runs/orchestration/success_replay.py):
their tokens are never masked and do not count in the metrics of ages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from agentevo.algorithms.importance import effective_sample_size
from agentevo.errors import TrainingError
from agentevo.types import Sample, Trajectory

AGE = "age"
"""The column of `Sample.columns` with each trained token's age."""
ESS = "actor/ess_age_"
"""The prefix of the metrics of `effective_sizes`. The age follows it."""
STALE = "stale"
"""The reason why a whole trajectory is left out, for losses that compare whole answers."""
_SUMS = "by_age/"


class _AgedTokens(NamedTuple):
    """The tokens that the policy sampled in a sample or a trajectory, [T] each."""

    trajectory_id: str
    versions: np.ndarray
    ages: np.ndarray
    fresh: np.ndarray


def mask_stale(
    samples: Sequence[Sample],
    *,
    trainer_version: int,
    bound: int | None = None,
    replayed: Collection[str] = (),
) -> tuple[list[Sample], dict[str, float]]:
    """Removes the trained tokens older than `bound` from the loss mask of the samples and from
    every column, and adds the column "age" for the others. A sample without remaining trained
    tokens is left out. If `bound` is None, tokens of every age are trained. `replayed`: the ids of
    trajectories whose tokens of every age are trained.

    Raises TrainingError for tokens without a version, or newer than the trainer.
    """
    _check(trainer_version, bound)
    aged = []
    for sample in samples:
        versions = sample.versions[sample.loss_mask]
        own_bound = None if sample.trajectory_id in replayed else bound
        aged.append(_ages_of(sample.trajectory_id, versions, trainer_version, own_bound))

    fresh_samples = [
        _only(sample, tokens)
        for sample, tokens in zip(samples, aged, strict=True)
        if tokens.fresh.any()
    ]
    sampled = [tokens for tokens in aged if tokens.trajectory_id not in replayed]
    return fresh_samples, _metrics(sampled, bound)


def leave_out_stale(
    trajectories: Sequence[Trajectory], *, trainer_version: int, bound: int | None = None
) -> tuple[list[Trajectory], dict[str, str], dict[str, float]]:
    """For losses of whole answers, which need every token. Returns the trajectories without a token
    older than `bound`, the ids of the others -> "stale", and the metrics. Raises the errors of
    `mask_stale`."""
    _check(trainer_version, bound)
    fresh_trajectories = []
    dropped = {}
    aged = []
    for trajectory in trajectories:
        columns = [np.asarray(turn.versions) for turn in trajectory.turns]
        versions = np.concatenate(columns) if columns else np.zeros(0, dtype=np.int32)
        tokens = _ages_of(trajectory.id, versions, trainer_version, bound)
        if tokens.fresh.all():
            fresh_trajectories.append(trajectory)
        else:
            dropped[trajectory.id] = STALE

        aged.append(tokens._replace(fresh=np.full(len(versions), tokens.fresh.all())))

    return fresh_trajectories, dropped, _metrics(aged, bound)


def age_of_oldest(trajectory: Trajectory, *, trainer_version: int) -> int:
    """The age of the trajectory's oldest token; 0 without tokens."""
    versions = (version for turn in trajectory.turns for version in turn.versions)
    return trainer_version - min(versions, default=trainer_version)


def age_sums(weights: torch.Tensor, ages: torch.Tensor) -> dict[str, float]:
    """For each age: the number of tokens, the sum of their weights, and the sum of the squared
    weights. These add up over micro-batches and ranks.

    weights, ages: [M].
    """
    wide = weights.detach().double()
    sums: dict[str, float] = {}
    for age in ages.unique().tolist():
        of_age = wide[ages == age]
        key = f"{_SUMS}{round(age)}"
        sums |= {
            f"{key}/count": float(len(of_age)),
            f"{key}/total": float(of_age.sum()),
            f"{key}/squares": float(of_age.square().sum()),
        }

    return sums


def effective_sizes(sums: MutableMapping[str, float]) -> dict[str, float]:
    """Removes the sums of `age_sums` from `sums` and returns actor/ess_age_K = total^2 / (count *
    squares), which is 0 if every weight is 0.

    The value is `algorithms.importance.effective_sample_size` over the tokens of age K.
    """
    sums_of_ages = {key: sums.pop(key) for key in [key for key in sums if key.startswith(_SUMS)]}
    ages = sorted({int(key.split("/")[1]) for key in sums_of_ages})
    sizes = {}
    for age in ages:
        count, total, squares = (
            sums_of_ages[f"{_SUMS}{age}/{name}"] for name in ("count", "total", "squares")
        )
        sizes[f"{ESS}{age}"] = effective_sample_size(total, squares, count)

    return sizes


def of_first_update(updates: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The metrics of a step's optimizer steps. Only the metrics of the first optimizer step have
    effective sample sizes, because the policy has changed after it."""
    return [
        *updates[:1],
        *(
            {key: value for key, value in update.items() if not key.startswith(ESS)}
            for update in updates[1:]
        ),
    ]


def _check(trainer_version: int, bound: int | None) -> None:
    if trainer_version < 0:
        raise ValueError(
            f"trainer_version={trainer_version} is not a number of committed steps: give 0 or more"
        )
    if bound is not None and bound < 0:
        raise ValueError(f"bound={bound} would leave no token: give rollout.staleness, 0 or more")


def _ages_of(
    name: str, versions: np.ndarray, trainer_version: int, bound: int | None
) -> _AgedTokens:
    if len(versions) and versions.min() < 0:
        raise TrainingError(
            f"trajectory {name} has a token without a version, so its age is unknown: sample it "
            f"again"
        )

    if len(versions) and versions.max() > trainer_version:
        raise TrainingError(
            f"trajectory {name} has a token of version {versions.max()}, and the trainer is at "
            f"{trainer_version}: these weights were never "
            "committed; resume the run from its last step, or drop the trajectory"
        )

    ages = trainer_version - versions
    return _AgedTokens(
        name, versions, ages, np.ones(len(ages), dtype=bool) if bound is None else ages <= bound
    )


def _only(sample: Sample, tokens: _AgedTokens) -> Sample:
    """The sample with its loss mask reduced to its fresh tokens."""
    columns = {**sample.columns, AGE: tokens.ages}
    if tokens.fresh.all():
        return msgspec.structs.replace(sample, columns=columns)

    mask = sample.loss_mask.copy()
    mask[sample.loss_mask] = tokens.fresh
    return msgspec.structs.replace(
        sample,
        loss_mask=mask,
        logprobs=np.where(mask, sample.logprobs, 0.0),
        versions=np.where(mask, sample.versions, -1),
        advantages=sample.advantages[tokens.fresh],
        columns={name: values[tokens.fresh] for name, values in columns.items()},
    )


def _metrics(aged: Sequence[_AgedTokens], bound: int | None) -> dict[str, float]:
    aged = [tokens for tokens in aged if len(tokens.ages)]
    if not aged:
        return {}

    ages = np.concatenate([tokens.ages for tokens in aged])
    fresh = np.concatenate([tokens.fresh for tokens in aged])
    trained = ages[fresh]
    of_age = np.bincount(trained, minlength=(0 if bound is None else bound) + 1)
    metrics = {
        f"staleness/age_{age}": count / len(ages) for age, count in enumerate(of_age.tolist())
    }
    metrics |= {
        "staleness/masked": float(1.0 - fresh.mean()),
        "staleness/masked_tokens": float((~fresh).sum()),
    }
    if len(trained):
        metrics |= {"staleness/mean": float(trained.mean()), "staleness/max": float(trained.max())}

    of_trajectory: dict[str, list[_AgedTokens]] = {}
    for tokens in aged:
        of_trajectory.setdefault(tokens.trajectory_id, []).append(tokens)

    spreads = [
        max(int(part.versions.max()) for part in parts)
        - min(int(part.versions.min()) for part in parts)
        for parts in of_trajectory.values()
    ]
    metrics["staleness/trajectory_spread"] = sum(spreads) / len(spreads)
    wholly = sum(not any(part.fresh.any() for part in parts) for parts in of_trajectory.values())
    return metrics | {"staleness/masked_trajectories": float(wholly)}
