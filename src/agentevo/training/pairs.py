"""Answers to compare, made from groups of trajectories.

    loss         the answers of a group
    kto          every attempt alone, desirable if it succeeded: the binary signal of the paper
    rft          its best successful attempts, none twice
    others       pairs of attempts: best against worst, or every two whose rewards differ by more
                 than rounding (types/equality.py); or, for each attempt, the solver's
                 conversation on the same task as the chosen answer

An answer consists of all the policy's tokens in an attempt: the trained tokens of its rows, several
where the trajectory branches or starts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import msgspec
import numpy as np
import torch

from agentevo.algorithms.presets import PreferenceAlgorithm
from agentevo.config import AlgorithmSection
from agentevo.runtime.seeds import derive_seed
from agentevo.training.batching.samples import trajectory_rows
from agentevo.types import Sample, Trajectory
from agentevo.types.equality import EQUAL, levels

Demonstrations = Callable[[str], Sequence[Sample]]
"""Task id -> the answer of the environment's solver to that task; empty if it has none."""


@dataclass(frozen=True, eq=False)
class CandidateAnswer:
    """An answer to one task, as samples to train on."""

    name: str
    """Id of the trajectory, or of another source: unique among a step's answers."""
    rows: tuple[Sample, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Trained ones."""
        return sum(row.num_trained for row in self.rows)

    def says(self, candidate: CandidateAnswer) -> bool:
        """Whether the candidate is the same, token by token."""
        return len(self.rows) == len(candidate.rows) and all(
            np.array_equal(row.ids, other_row.ids)
            and np.array_equal(row.loss_mask, other_row.loss_mask)
            and row.images == other_row.images
            for row, other_row in zip(self.rows, candidate.rows, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Pair:
    """A chosen and a rejected answer to one task; or a single one, which is chosen (desirable) or
    rejected (undesirable)."""

    group_id: str
    chosen: CandidateAnswer | None = None
    rejected: CandidateAnswer | None = None
    win_probs: tuple[float, float] = (1.0, 0.0)
    """Probability of each to beat an answer that the policy samples."""

    @property
    def answers(self) -> list[CandidateAnswer]:
        """One or two."""
        return [answer for answer in (self.chosen, self.rejected) if answer is not None]

    @property
    def samples(self) -> list[Sample]:
        """Those of its answers."""
        return [sample for answer in self.answers for sample in answer.rows]


def answer_of(trajectory: Trajectory) -> CandidateAnswer:
    """All the policy's tokens in a trajectory, under its own distribution: neither the masks of a
    grammar nor penalties are applied, even if the tokens were sampled under them."""
    rows = [row.sample for row in trajectory_rows(trajectory) if row.sample.num_trained]
    return CandidateAnswer(
        trajectory.id, tuple(msgspec.structs.replace(row, penalties=None) for row in rows)
    )


def make_pairs(
    trajectories: Sequence[Trajectory],
    algorithm: PreferenceAlgorithm,
    section: AlgorithmSection,
    demonstrations: Demonstrations | None = None,
) -> list[Pair]:
    """The pairs of every group, in order of the groups' first members. Which attempts they consist
    of depends on ids and rewards only.

    `demonstrations` is needed where `algorithm.pairs` is `demonstrations`. Two answers that are the
    same make no pair.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)

    pairs: list[Pair] = []
    for members in groups.values():
        ranks = zip(levels([t.reward for t in members]), members, strict=True)
        level = {t.id: rank for rank, t in ranks}
        members.sort(key=lambda t: (-level[t.id], t.attempt, t.id))
        if algorithm.loss == "kto":
            pairs += [_single(t, desirable=t.success) for t in members]
        elif algorithm.loss == "rft":
            pairs += _best(members, section.pairs_per_group or 1)
        elif algorithm.pairs == "demonstrations":
            assert demonstrations is not None
            pairs += _against_the_solver(members, demonstrations, section.pairs_per_group)
        else:
            limit = section.pairs_per_group or (1 if algorithm.pairs == "best_worst" else None)
            candidates = _ends(members) if algorithm.pairs == "best_worst" else _everyone(members)
            pairs += _compare(members, candidates, section.pair_margin, limit)

    return pairs


def win_probabilities(rewards: Sequence[float]) -> list[float]:
    """Probability of each attempt to beat one that the policy samples, estimated on its group: the
    share of the group's attempts, itself included, that earned less, an equal reward counting one
    half. Source: arXiv 2405.00675, whose estimate is the mean over all K samples."""
    level = levels(rewards)
    return [
        sum((reward > rival) + 0.5 * (reward == rival) for rival in level) / len(level)
        for reward in level
    ]


def _single(trajectory: Trajectory, *, desirable: bool) -> Pair:
    answer = answer_of(trajectory)
    return Pair(
        trajectory.group_id,
        chosen=answer if desirable else None,
        rejected=None if desirable else answer,
    )


def _best(members: Sequence[Trajectory], limit: int) -> list[Pair]:
    """Pairs from members that are sorted from the highest reward down."""
    pairs: list[Pair] = []
    for trajectory in members:
        pair = _single(trajectory, desirable=True)
        if (
            len(pairs) < limit
            and trajectory.success
            and not any(pair.answers[0].says(earlier.answers[0]) for earlier in pairs)
        ):
            pairs.append(pair)

    return pairs


def _against_the_solver(
    members: Sequence[Trajectory], demonstrations: Demonstrations, limit: int | None
) -> list[Pair]:
    """Members from the lowest reward up are rejected."""
    group = members[0].group_id
    rows = tuple(
        msgspec.structs.replace(row, group_id=group) for row in demonstrations(members[0].task_id)
    )
    if not rows:
        return []

    shown = CandidateAnswer(f"{group} by the solver", rows)
    rejected = [answer for t in reversed(members) if not shown.says(answer := answer_of(t))]
    return [Pair(group, shown, answer) for answer in rejected[:limit]]


def _ends(members: Sequence[Trajectory]) -> Iterator[tuple[int, int]]:
    """The best and the worst, the next best and the next worst, ..."""
    return ((place, len(members) - 1 - place) for place in range(len(members) // 2))


def _everyone(members: Sequence[Trajectory]) -> Iterator[tuple[int, int]]:
    """All pairs, those that differ most first."""
    places = list(combinations(range(len(members)), 2))
    gaps = levels([members[better].reward - members[worse].reward for better, worse in places])
    order = sorted(range(len(places)), key=lambda place: -gaps[place])
    return (places[place] for place in order)


def _compare(
    members: Sequence[Trajectory],
    candidates: Iterator[tuple[int, int]],
    margin: float,
    limit: int | None,
) -> list[Pair]:
    """Pairs of places in the group, restricted to those whose rewards differ enough and whose
    answers are not equal."""
    answers = [answer_of(t) for t in members]
    chances = win_probabilities([t.reward for t in members])
    level = levels([t.reward for t in members])
    slack = EQUAL * max(abs(t.reward) for t in members)
    pairs: list[Pair] = []
    for better, worse in candidates:
        gap = members[better].reward - members[worse].reward
        if (
            level[better] > level[worse]
            and margin - gap <= slack
            and not answers[better].says(answers[worse])
            and (limit is None or len(pairs) < limit)
        ):
            pairs.append(
                Pair(
                    members[0].group_id,
                    answers[better],
                    answers[worse],
                    (chances[better], chances[worse]),
                )
            )

    return pairs


class PairData:
    """Yields the given pairs, a step's worth at a time: groups of pairs in an order that the seed
    shuffles again each round. Pairs that do not fill a step at a round's end wait: no step has a
    group twice."""

    def __init__(self, groups: Sequence[Sequence[Pair]], per_step: int, seed: int) -> None:
        self.groups = groups
        self.seed = seed
        self.per_step = min(per_step, len(groups))

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256()
        for pair in (pair for group in self.groups for pair in group):
            digest.update(repr((pair.chosen is None, pair.win_probs)).encode())
            for row in (row for answer in pair.answers for row in answer.rows):
                digest.update(f"{len(row.ids)}/".encode() + row.ids.tobytes())
                digest.update(row.loss_mask.tobytes())
                digest.update("".join(span.digest for span in row.images).encode())
        return digest.hexdigest()

    def digest(self) -> str:
        """SHA-256 of everything that is trained on, hex."""
        return self._sha256

    def of_step(self, step: int) -> list[Pair]:
        """The pairs of step `step`, from 1."""
        round_, place = divmod(step - 1, len(self.groups) // self.per_step)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "pairs", round_))
        order = torch.randperm(len(self.groups), generator=generator).tolist()
        return [
            pair
            for index in order[place * self.per_step : (place + 1) * self.per_step]
            for pair in self.groups[index]
        ]
