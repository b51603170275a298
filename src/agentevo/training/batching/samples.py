"""Converts trajectories to training samples with advantages: one sample per leaf of the turn tree,
with each sampled token trained exactly once.

A per-attempt advantage is computed from the attempt's reward. A per-token or per-turn advantage
reads each turn's reward at the turn's last token, and the attempt's remaining reward at the
attempt's last token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from agentevo.algorithms.advantage_inputs import AdvantageTables
from agentevo.algorithms.estimators import Advantage
from agentevo.errors import TrainingError
from agentevo.training.batching.constrained import TurnMasks, join_masks
from agentevo.training.batching.credit import TurnCredits, credit_table
from agentevo.training.batching.images import path_images
from agentevo.training.batching.routing import path_rows
from agentevo.types import Sample, Trajectory, Turn, path_of
from agentevo.types.penalties import TokenPenalties

Tables: TypeAlias = Mapping[str, torch.Tensor]
"""Name -> numbers of the trained tokens, [S, T]. Row s begins with the numbers of sample s."""

UPDATE_COLUMNS = ("old_logp", "ref_logp", "values")
"""The names of the tables that the samples keep for the update."""


class SampleRow(NamedTuple):
    """A sample without advantages."""

    trajectory: Trajectory
    sample: Sample
    turns: np.ndarray
    """[M] int64: the turn of each trained token."""


def advantages_of(
    rows: Sequence[SampleRow],
    advantage: Advantage,
    tables: Tables = MappingProxyType({}),
    *,
    bonus: torch.Tensor | None = None,
    baselines: Mapping[str, float] = MappingProxyType({}),
    weights: Mapping[str, float] = MappingProxyType({}),
    turn_credits: TurnCredits = MappingProxyType({}),
    teacher: torch.Tensor | None = None,
    reward_weight: float = 1.0,
) -> list[Sample]:
    """The samples with their advantages and with the columns that the update needs.

    `tables`: name -> [S, T], the results of passes over the rows; bonus [S, T] is added to the
    environment's rewards; baselines: task id -> reward of its greedy attempt; weights of the reward
    parts (default 1). `turn_credits`: the reward of each turn. `teacher` [S, T]: the teacher's
    advantages, which are added to `reward_weight` times the others. Raises TrainingError if the
    advantage can't use the rewards.
    """
    if not rows:
        return []

    per_turn = advantage.is_recursion or advantage.function is not None
    rewards, turn_ids = _reward_table(rows, per_turn=per_turn)
    mask = turn_ids >= 0
    if bonus is not None:
        rewards += torch.where(mask, bonus.double(), 0.0)

    inputs = _inputs_of(rows, turn_ids, advantage.needs, tables, baselines, weights)
    if turn_credits:
        inputs["turn_credit"] = credit_table(
            [row.trajectory for row in rows], turn_ids, turn_credits
        )

    try:
        advantages, returns = advantage(
            AdvantageTables(
                token_rewards=rewards,
                mask=mask,
                group_ids=[row.trajectory.group_id for row in rows],
                trajectory_ids=[row.trajectory.id for row in rows],
                turn_ids=turn_ids,
                **inputs,
            )
        )
    except ValueError as error:
        raise TrainingError(
            f"{error} (of this step's attempts; the weights were not changed)"
        ) from error

    if teacher is not None:
        advantages = reward_weight * advantages + teacher

    columns = {name: tables[name] for name in UPDATE_COLUMNS if name in tables} | (
        {"returns": returns} if "values" in tables else {}
    )
    return [
        _finish_sample(
            row.sample, advantages[index], {name: table[index] for name, table in columns.items()}
        )
        for index, row in enumerate(rows)
    ]


def _inputs_of(
    rows: Sequence[SampleRow],
    turn_ids: torch.Tensor,
    needs: Collection[str],
    tables: Tables,
    baselines: Mapping[str, float],
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """The inputs of an advantage in addition to rewards, groups and turns, by their names in
    AdvantageTables."""
    inputs: dict[str, Any] = {name: table for name, table in tables.items() if name in needs}
    if "baseline_rewards" in needs:
        inputs["baseline_rewards"] = torch.tensor(
            [baselines[row.trajectory.task_id] for row in rows], dtype=torch.float64
        )

    if "reward_parts" in needs:
        parts = _reward_parts(rows)
        inputs |= {
            "reward_parts": parts,
            "reward_weights": {name: weights.get(name, 1.0) for name in parts},
        }

    if "turn_parents" in needs:
        inputs["turn_parents"] = _parent_table(rows, turn_ids)

    if "turn_observations" in needs:
        inputs["turn_observations"] = _observation_table(rows, turn_ids)

    return inputs


def _finish_sample(
    sample: Sample, advantages: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> Sample:
    """The sample with its advantages and columns, which are views of the tables."""
    count = sample.num_trained
    trained = {name: row[:count].numpy() for name, row in columns.items()}
    return msgspec.structs.replace(sample, advantages=advantages[:count].numpy(), columns=trained)


def _reward_table(
    rows: Sequence[SampleRow], *, per_turn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards [S, T] float64 and turns [S, T] int64 (-1 for padding)."""
    width = max(len(row.turns) for row in rows)
    rewards = torch.zeros(len(rows), width, dtype=torch.float64)
    turn_ids = torch.full((len(rows), width), -1, dtype=torch.int64)
    last_row = {row.trajectory.id: index for index, row in enumerate(rows) if len(row.turns)}
    for index, (trajectory, _, turns) in enumerate(rows):
        turn_ids[index, : len(turns)] = torch.from_numpy(turns)
        if per_turn and len(turns):
            last_tokens = [*np.flatnonzero(np.diff(turns)).tolist(), len(turns) - 1]
            for position in last_tokens:
                rewards[index, position] += trajectory.turns[turns[position]].reward

        if last_row.get(trajectory.id) == index:
            turn_rewards = sum(turn.reward for turn in trajectory.turns) if per_turn else 0.0
            rewards[index, len(turns) - 1] += trajectory.reward - turn_rewards

    return rewards, turn_ids


def _parent_table(rows: Sequence[SampleRow], turn_ids: torch.Tensor) -> torch.Tensor:
    """[S, T] int64: the parent of the turn of each trained token, -1 for a root."""
    table = torch.full_like(turn_ids, -1)
    for index, (trajectory, _, turns) in enumerate(rows):
        parents = [-1 if turn.parent is None else turn.parent for turn in trajectory.turns]
        table[index, : len(turns)] = torch.tensor(parents)[torch.from_numpy(turns)]
    return table


def _observation_table(rows: Sequence[SampleRow], turn_ids: torch.Tensor) -> torch.Tensor:
    """[S, T] int64: a number for what the turn of each trained token answers: the new tokens of its
    prompt, and their images. -1 for padding."""
    numbers: dict[tuple[bytes, tuple[str, ...]], int] = {}
    table = torch.full_like(turn_ids, -1)
    for index, (trajectory, _, turns) in enumerate(rows):
        of_turns = torch.full((len(trajectory.turns),), -1)
        for number in set(turns.tolist()):
            turn = trajectory.turns[number]
            ids = np.asarray(turn.prompt_ids, dtype=np.int64).tobytes()
            images = tuple(image.digest for image in turn.images)
            of_turns[number] = numbers.setdefault((ids, images), len(numbers))
        table[index, : len(turns)] = of_turns[torch.from_numpy(turns)]

    return table


def _reward_parts(rows: Sequence[SampleRow]) -> dict[str, torch.Tensor]:
    """Name -> [S] float64. A part that a trajectory lacks counts as 0. Raises TrainingError if a
    trajectory has no parts."""
    without_parts = next(
        (row.trajectory.id for row in rows if not row.trajectory.reward_parts), None
    )
    if without_parts is not None:
        raise TrainingError(
            f"trajectory {without_parts} has a reward without parts, and algorithm.advantage=gdpo "
            "normalises each part: return the parts as "
            "Outcome(reward_parts={...}), or choose grpo"
        )

    names = sorted({name for row in rows for name in row.trajectory.reward_parts})
    return {
        name: torch.tensor(
            [row.trajectory.reward_parts.get(name, 0.0) for row in rows], dtype=torch.float64
        )
        for name in names
    }


def trajectory_rows(
    trajectory: Trajectory,
    masks: TurnMasks = MappingProxyType({}),
    *,
    train_observations: bool = False,
    never_sampled: Collection[int] = (),
    routed: bool = False,
) -> list[SampleRow]:
    """One row per root-to-leaf path. A turn on several paths is trained only in the first path, and
    is context in the others. A turn that was sampled from another distribution than the recipe's,
    or under a grammar whose masks are None, is always context. A path without trained tokens has no
    row. `masks`: turn -> the masks of its grammar, if the loss uses the masked distribution.

    `train_observations`: the tokens that the policy read between two turns of a path belong to the
    later turn, and are trained with it. They were not sampled, so their log-probs are nan until
    `with_observed_logprobs`. `never_sampled`: ids without a log-prob, which are not trained in
    observations: those of images. `routed`: the samples get the recorded routed experts. Raises
    TrainingError if the experts don't fit the turns."""
    parents = {turn.parent for turn in trajectory.turns}
    context_turns = {turn.index for turn in trajectory.turns if turn.overrides is not None}
    context_turns |= {index for index, turn_masks in masks.items() if turn_masks is None}
    rows = []
    for leaf in trajectory.turns:
        if leaf.index in parents:
            continue

        path = path_of(trajectory.turns, leaf.index)
        if any(turn.index not in context_turns for turn in path):
            observed = [
                ~np.isin(np.asarray(turn.prompt_ids), list(never_sampled))
                if train_observations and number and turn.index not in context_turns
                else np.zeros(len(turn.prompt_ids), dtype=np.bool_)
                for number, turn in enumerate(path)
            ]
            row = _path_row(trajectory, path, context_turns, masks, observed)
            rows.append(_with_routed_experts(row, path) if routed else row)

        context_turns.update(turn.index for turn in path)

    return rows


def with_observed_logprobs(rows: Sequence[SampleRow], logprobs: torch.Tensor) -> list[SampleRow]:
    """The rows, with the trainer's log-probs [S, T] for tokens without log-probs."""
    return [
        row._replace(sample=_fill_logprobs(row.sample, row_logprobs))
        for row, row_logprobs in zip(rows, logprobs.numpy(), strict=True)
    ]


def teacher_table(rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, T] float32: the teacher's log-probs of the trained tokens, 0 for padding. Raises
    TrainingError for an attempt that no teacher has scored."""
    table = torch.zeros(len(rows), max(len(row.turns) for row in rows))
    for index, (trajectory, _, turns) in enumerate(rows):
        scores = [trajectory.turns[turn].teacher_logprobs for turn in dict.fromkeys(turns.tolist())]
        column = np.array([x for score in scores for x in score or ()], dtype=np.float32)
        if len(column) != len(turns):
            raise TrainingError(
                f"trajectory {trajectory.id} has a teacher's log-probs for {len(column)} of "
                f"{len(turns)} trained tokens: it was made without distillation.teachers; start a "
                "new run, or remove distillation"
            )
        table[index, : len(turns)] = torch.from_numpy(column)

    return table


def _with_routed_experts(row: SampleRow, path: Sequence[Turn]) -> SampleRow:
    recorded = path_rows(row.trajectory.id, path)
    return row._replace(sample=msgspec.structs.replace(row.sample, routed_experts=recorded))


def _fill_logprobs(sample: Sample, observed: np.ndarray) -> Sample:
    sampled = sample.logprobs[sample.loss_mask]
    filled = sample.logprobs.copy()
    filled[sample.loss_mask] = np.where(np.isnan(sampled), observed[: len(sampled)], sampled)
    return msgspec.structs.replace(sample, logprobs=filled)


def _path_row(
    trajectory: Trajectory,
    path: list[Turn],
    context_turns: set[int],
    masks: TurnMasks,
    observed: Sequence[np.ndarray],
) -> SampleRow:
    """`observed`: for each turn, which tokens of its prompt are trained, bool."""
    fresh = [turn.index not in context_turns for turn in path]
    piece_sizes = [
        size for turn in path for size in (len(turn.prompt_ids), len(turn.completion_ids))
    ]
    mask = np.concatenate(
        [
            piece
            for turn, is_fresh, of_prompt in zip(path, fresh, observed, strict=True)
            for piece in (of_prompt, np.full(len(turn.completion_ids), is_fresh))
        ]
    )
    fresh_turns = [
        (turn, int(of_prompt.sum()))
        for turn, is_fresh, of_prompt in zip(path, fresh, observed, strict=True)
        if is_fresh
    ]
    logprobs = np.zeros(len(mask), dtype=np.float32)
    versions = np.full(len(mask), -1, dtype=np.int32)
    if fresh_turns:
        logprobs[mask] = np.concatenate(
            [
                piece
                for turn, num_observed in fresh_turns
                for piece in ([np.nan] * num_observed, turn.logprobs)
            ]
        )
        versions[mask] = np.concatenate(
            [
                piece
                for turn, num_observed in fresh_turns
                for piece in (
                    [turn.versions[0]] * num_observed if num_observed else [],
                    turn.versions,
                )
            ]
        )

    masks_of_turns = [
        masks.get(turn.index) if is_fresh else None
        for turn, is_fresh in zip(path, fresh, strict=True)
    ]
    masks_of_pieces = [piece for turn_masks in masks_of_turns for piece in (None, turn_masks)]
    penalties = [piece for turn in path for piece in (None, turn.penalties)]
    images, processor = path_images(trajectory.id, path)
    sample = Sample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        ids=np.concatenate(
            [ids for turn in path for ids in (turn.prompt_ids, turn.completion_ids)]
        ),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        advantages=np.zeros(np.count_nonzero(mask)),
        temperature=next(turn.temperature for turn in path if turn.overrides is None),
        masks=join_masks(list(zip(piece_sizes, masks_of_pieces, strict=True))),
        penalties=TokenPenalties.join(list(zip(piece_sizes, penalties, strict=True))),
        images=images,
        processor=processor,
    )
    turns = np.repeat(
        np.array([turn.index for turn, _ in fresh_turns], dtype=np.int64),
        [num_observed + len(turn.completion_ids) for turn, num_observed in fresh_turns],
    )
    return SampleRow(trajectory, sample, turns)
