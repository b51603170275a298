"""From a step's trajectories to its samples: first the inputs of every trained token, then rewards,
then advantages.

All passes here are without gradient and use the weights from before the update, except those of
PRIME's process reward, which first learns from the step's outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.algorithms.distillation import teacher_advantage
from agentevo.algorithms.divergence import bind_kl
from agentevo.algorithms.estimators import bind_advantage
from agentevo.algorithms.value import explained_variance
from agentevo.config import AlgorithmSection
from agentevo.config.distillation import DistillationSection
from agentevo.config.routing import recomputes
from agentevo.errors import TrainingError
from agentevo.models.compute.routers import KEY
from agentevo.models.grammar import Grammars
from agentevo.training.algorithm_functions import bound_advantage
from agentevo.training.batching.constrained import masks_of
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.passes import PackedStep, device_of, token_tables
from agentevo.training.batching.samples import (
    SampleRow,
    Tables,
    advantages_of,
    teacher_table,
    trajectory_rows,
    with_observed_logprobs,
)
from agentevo.training.kernels.output_layer import token_logprobs, token_logprobs_and_squares
from agentevo.training.learner import PreparedBatch
from agentevo.training.roles.critic import Critic
from agentevo.training.roles.process_reward import ImplicitProcessReward
from agentevo.training.roles.reference import Reference
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.routing_replay import RoutingReplay
from agentevo.types import Sample, Trajectory


@dataclass(eq=False)
class Roles:
    """The models other than the policy; those that the algorithm does not use are None."""

    policy: PreTrainedModel
    reference: Reference | None = None
    critic: Critic | None = None
    process_reward: ImplicitProcessReward | None = None
    reward_model: TokenRewardModel | None = None


class Preparation:
    """Makes a step's samples; see the module."""

    def __init__(
        self,
        section: AlgorithmSection,
        max_tokens: int,
        *,
        merge: bool = True,
        grammars: Grammars | None = None,
        replay: RoutingReplay,
        packed: PackedStep | None = None,
        distillation: DistillationSection | None = None,
        images: ImageProvider | None = None,
    ) -> None:
        """`packed`: the update's, which packs nothing again that this preparation has packed.
        Raises TrainingError for a replay that no pass of this preparation would record."""
        self.grammars = grammars
        self.replay = replay
        self.section = section
        self.max_tokens = max_tokens
        self.merge = merge
        self.packed = packed
        self.images = images
        self.distillation = distillation or DistillationSection()
        algorithm = section.resolve()
        self.advantage = bind_advantage(
            algorithm.advantage, algorithm.advantage_hyper, function=bound_advantage(section)
        )
        self.kl = bind_kl(section.kl)
        self.collision = "sum_pi_squared" in self.advantage.needs

        self.recomputed = recomputes(section)
        if replay.mode == "update" and not self.recomputed:
            raise TrainingError(
                f"{KEY}=update records in the pass that computes the old log-probs again: set "
                "algorithm.old_logprobs=recomputed"
            )

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        roles: Roles,
        *,
        kl_coef: float,
        baselines: Mapping[str, float],
        turn_credits: TurnCredits,
        monte_carlo: bool,
    ) -> PreparedBatch:
        """`baselines`: task id -> reward of the greedy attempt; `turn_credits`: the reward of each
        turn, where a function of the user gives it; `monte_carlo`: returns without a critic (while
        one is pretrained)."""
        masks, masked = masks_of(trajectories, self.grammars)
        observations = self.section.train_observations
        never_sampled = () if self.images is None else self.images.processor.vision_ids
        rows = [
            row
            for t in trajectories
            for row in trajectory_rows(
                t,
                masks.get(t.id, {}),
                train_observations=observations,
                never_sampled=never_sampled,
                routed=self.replay.reads_records,
            )
        ]
        if not rows:
            return PreparedBatch([], masked)

        rows = self.replay.begin(rows)
        tables, metrics = self._tables(rows, roles)
        rows = self.replay.finish(rows)
        if observations:
            rows = with_observed_logprobs(rows, tables["logp"])

        bonus, bonus_metrics = self._bonus(rows, roles, tables, kl_coef)
        teacher, teacher_metrics = self._distil(rows, tables)
        samples = advantages_of(
            rows,
            self.advantage.monte_carlo() if monte_carlo else self.advantage,
            tables,
            bonus=bonus,
            baselines=baselines,
            weights=self.section.reward_weights,
            turn_credits=turn_credits,
            teacher=teacher,
            reward_weight=self.distillation.reward_weight,
        )
        metrics |= teacher_metrics
        if self.recomputed:
            metrics |= _mismatch(_rollout_logprobs(rows), tables["logp"], _mask(rows))
        if roles.critic is not None:
            bonus_metrics["critic/vf_explained_var"] = _foreseen(samples)

        return PreparedBatch(samples, metrics | bonus_metrics | masked)

    def _tables(self, rows: Sequence[SampleRow], roles: Roles) -> tuple[Tables, dict[str, float]]:
        """Name -> table [S, T] float32, for all inputs of the advantage and the update."""
        samples = [row.sample for row in rows]
        device = device_of(roles.policy)

        def compute(batch: PackedBatch) -> dict[str, torch.Tensor]:
            columns: dict[str, torch.Tensor] = {}
            routed = self.replay.before_update(batch)
            if self.recomputed or self.collision:
                if self.collision:
                    columns["logp"], squares = token_logprobs_and_squares(roles.policy, routed)
                    columns["sum_pi_squared"] = squares[batch.rows]
                else:
                    columns["logp"] = token_logprobs(roles.policy, routed)[0]
                if self.recomputed:
                    columns["old_logp"] = columns["logp"]

            if roles.reference is not None:
                columns["ref_logp"] = roles.reference.logprobs(batch)
            if roles.critic is not None:
                columns["values"] = roles.critic.values(routed if roles.critic.shared else batch)
            if roles.reward_model is not None:
                columns["reward_model"] = roles.reward_model.rewards(batch)

            return columns

        has_role = any(
            role is not None for role in (roles.reference, roles.critic, roles.reward_model)
        )
        if not (self.recomputed or self.collision or has_role):
            return {}, {}

        tables = token_tables(
            samples,
            self.max_tokens,
            device,
            compute,
            merge=self.merge,
            packed=self.packed,
            listen=self.replay.heard,
            images=self.images,
        )
        if roles.process_reward is None:
            return tables, {}

        process = roles.process_reward
        reference = tables["ref_logp"]
        owners, successes = _owners(rows)
        metrics = process.update(samples, owners, reference, successes)
        learnt = token_tables(
            samples,
            self.max_tokens,
            device,
            lambda batch: {"phi": token_logprobs(process.model, batch)[0]},
            merge=self.merge,
            packed=self.packed,
            images=self.images,
        )
        tables["process_rewards"] = process.section.beta * (learnt["phi"] - reference)
        return tables, metrics

    def _bonus(
        self, rows: Sequence[SampleRow], roles: Roles, tables: Tables, kl_coef: float
    ) -> tuple[torch.Tensor | None, dict[str, float]]:
        """[S, T]: the bonus on the environment's rewards; and its metrics. With a KL penalty of
        either kind, these include the mean reward of an attempt less its penalty."""
        bonus = None
        metrics = {}
        mask = _mask(rows)
        if roles.reward_model is not None:
            bonus = tables["reward_model"]
            metrics["reward_model/mean"] = float(bonus[mask].mean())

        if roles.reference is not None and kl_coef > 0:
            distance = self.kl(
                tables["logp"] if self.recomputed else _rollout_logprobs(rows),
                tables["ref_logp"],
                mask,
            )
            rewards = {row.trajectory.id: row.trajectory.reward for row in rows}
            penalty = kl_coef * float(distance[mask].sum())
            metrics["critic/rewards/mean"] = (sum(rewards.values()) - penalty) / len(rewards)
            if self.section.kl_in == "reward":
                metrics["actor/reward_kl"] = float(distance[mask].mean())
                bonus = -kl_coef * distance if bonus is None else bonus - kl_coef * distance

        return bonus, metrics

    def _distil(
        self, rows: Sequence[SampleRow], tables: Tables
    ) -> tuple[torch.Tensor | None, dict[str, float]]:
        """[S, T]: the weighted advantages by the teacher, None without one; and their metrics."""
        section = self.distillation
        if not section.enabled:
            return None, {}

        logp = tables["logp"] if self.recomputed else _rollout_logprobs(rows)
        try:
            advantages, metrics = teacher_advantage(
                teacher_table(rows), logp, _mask(rows), clip=section.clip, center=section.center
            )
        except ValueError as error:
            raise TrainingError(f"distillation: {error}") from error

        return section.weight * advantages, metrics


def _foreseen(samples: Sequence[Sample]) -> float:
    """The share of the returns' variance that the critic explains."""
    returns, values = (
        torch.from_numpy(np.concatenate([s.columns[name] for s in samples])[None])
        for name in ("returns", "values")
    )
    return float(explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)))


def _mask(rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, T] bool: which places of the tables hold a trained token."""
    lengths = torch.tensor([len(row.turns) for row in rows])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _rollout_logprobs(rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, T] float32: the log-probs that the engine sampled with."""
    table = torch.zeros(_mask(rows).shape)
    for index, row in enumerate(rows):
        trained = row.sample.logprobs[row.sample.loss_mask]
        table[index, : len(trained)] = torch.from_numpy(trained)
    return table


def _owners(rows: Sequence[SampleRow]) -> tuple[list[int], list[bool]]:
    """The attempt of each row, and whether each attempt succeeded."""
    numbers: dict[str, int] = {}
    owners = [numbers.setdefault(row.trajectory.id, len(numbers)) for row in rows]
    successes = {row.trajectory.id: row.trajectory.success for row in rows}
    return owners, [successes[name] for name in numbers]


def _mismatch(rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The difference between the engine's and the trainer's log-probs, per token."""
    gap = (trainer - rollout)[mask]
    return {
        "rollout/logprob_gap_mean": float(gap.mean()),
        "rollout/logprob_gap_max": float(gap.abs().max()),
    }
