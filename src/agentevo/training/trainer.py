"""The trainer makes samples from trajectories, and one policy update and its metrics from samples.
It never calls an agent or an engine.

`policy_loss.py` defines the loss; `preparation.py` makes the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.divergence import KLController
from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    MemorySection,
    ProcessRewardSection,
    TrainerSection,
)
from agentevo.config.distillation import DistillationSection
from agentevo.models.compute.rows import shares_prefixes
from agentevo.models.grammar import Grammars
from agentevo.runtime.progress import ProgressBar, bar
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.batching.images import ImageProvider, admit
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.passes import (
    PackedStep,
    device_of,
    micro_batches,
    null_batches,
    run_null_batches,
)
from agentevo.training.batching.staleness import effective_sizes, mask_stale, of_first_update
from agentevo.training.kernels.output_layer import OutputListener
from agentevo.training.learner import PreparedBatch
from agentevo.training.optimization import Optimization, minibatches, over_updates
from agentevo.training.parallel import gather, num_processes, sum_over_ranks
from agentevo.training.phases import phase
from agentevo.training.policy_loss import MinibatchLoss
from agentevo.training.preparation import Preparation, Roles
from agentevo.training.roles.critic import Critic
from agentevo.training.roles.process_reward import ImplicitProcessReward
from agentevo.training.roles.reference import Reference
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.router_balance import RouterBalance
from agentevo.training.routing_replay import RoutingReplay
from agentevo.training.sharding.layouts import layouts_of
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.workload import FlopCounter
from agentevo.types import Sample, Trajectory
from agentevo.types.images import ImageFile


class Trainer:
    """Trains a model that was prepared by `agentevo.models.compute.attention.prepare`. Owns the
    optimizer, and the models of the other roles."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerSection,
        algorithm: AlgorithmSection,
        *,
        critic: CriticSection | None = None,
        process_reward: ProcessRewardSection | None = None,
        reward_model: TokenRewardModel | None = None,
        memory: MemorySection | None = None,
        grammars: Grammars | None = None,
        distillation: DistillationSection | None = None,
    ) -> None:
        """`grammars`: the grammars over the policy's tokens, for turns that were sampled under a
        grammar. `distillation`: how the teacher's log-probs become advantages. Raises
        TrainingError for a policy that does not support `trainer.routing_replay`, and ConfigError
        for one without the loss of `trainer.router_aux_loss_coef`."""
        self.section = trainer
        self.algorithm = algorithm
        self.critic_section = critic or CriticSection()
        self.process_section = process_reward or ProcessRewardSection()
        self.roles = Roles(model, reward_model=reward_model)
        self.objective = MinibatchLoss(algorithm)
        self.replay = RoutingReplay(trainer.routing_replay, model)
        self.balance = RouterBalance.of(
            model, trainer.router_aux_loss_coef, "trainer.router_aux_loss_coef"
        )
        self.packed = PackedStep()
        self.images = ImageProvider.of(model)
        self.preparation = Preparation(
            algorithm,
            trainer.micro_batch_tokens,
            merge=shares_prefixes(model, trainer.prefix_merging),
            grammars=grammars,
            replay=self.replay,
            packed=self.packed,
            distillation=distillation,
            images=self.images,
        )
        self.memory = memory or MemorySection()
        self.optimization = Optimization(
            model.parameters(), trainer, memory=self.memory, layouts=layouts_of(model)
        )
        self.flops = FlopCounter(model)
        self.steps = 0

        self.kl = KLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)

        self.numbers: TokenNumbers | None = None
        """The measurements of each token of the last step. None if they are not recorded."""
        self.mean_entropy: float | None = None
        """Mean entropy of the last optimizer step's tokens, in nats."""

    @property
    def model(self) -> PreTrainedModel:
        return self.roles.policy

    @property
    def is_critic_pretraining(self) -> bool:
        """Whether the next step teaches only the critic."""
        return self.roles.critic is not None and self.steps < self.critic_section.pretrain_steps

    def begin(self) -> None:
        """Starts training. Copies the policy's present weights to the other models that the
        algorithm needs."""
        needs = self.algorithm.needs
        if self.algorithm.kl_coef > 0 or "process_rewards" in needs:
            self.roles.reference = Reference(self.model, self.algorithm)

        if "values" in needs:
            self.roles.critic = Critic(self.model, self.critic_section, self.section, self.memory)
            self.optimization.leave_out(self.critic_section.pretrain_steps)

        if "process_rewards" in needs:
            self.roles.process_reward = ImplicitProcessReward(
                self.model, self.process_section, self.section, self.memory, images=self.images
            )

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """See Learner.show."""
        if self.images is not None:
            self.images.hold(images)

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = MappingProxyType({}),
        *,
        version: int | None = None,
        bound: int | None = None,
        turn_credits: TurnCredits = MappingProxyType({}),
        replayed: Collection[str] = (),
    ) -> PreparedBatch:
        """Makes samples for `step`. `baselines`: task id -> reward of the greedy attempt, if the
        algorithm uses these rewards. `turn_credits`: the reward of each turn, if `algorithm.credit`
        is set.

        With `version`, the number of committed steps, tokens more than `bound` versions away from
        it are not trained on, and the metrics contain the ages of all tokens (see `mask_stale`).
        The `replayed` trajectories (ids) are successes of earlier steps, with any age. A trajectory
        without trained tokens still counts in its group's baseline, so it is not in
        `dropped`. One whose images can't be shown to the model as it saw them is.
        """
        if version is None and bound is not None:
            raise ValueError(
                f"bound={bound} is counted from the trainer's version: give version=, the number "
                "of committed steps"
            )

        admitted, dropped, warnings = admit(self.images, trajectories)
        prepared = self.preparation(
            admitted,
            self.roles,
            kl_coef=self.kl.coef,
            baselines=baselines,
            turn_credits=turn_credits,
            monte_carlo=self.is_critic_pretraining,
        )
        if "actor/reward_kl" in prepared.metrics:
            prepared.metrics["actor/kl_coef"] = self.kl.coef
            self.kl.update(prepared.metrics["actor/reward_kl"], len(prepared.samples))

        prepared.dropped |= dropped
        prepared.warnings += warnings
        if version is not None:
            prepared.samples, ages = mask_stale(
                prepared.samples, trainer_version=version, bound=bound, replayed=replayed
            )
            prepared.metrics |= ages

        return prepared

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One update from a batch of samples: `epochs` passes of `minibatches` optimizer steps. A
        group is never split over minibatches.

        Raises TrainingError, before the weights change, if the loss or the gradient is not finite.
        """
        self.replay.check(samples)
        if self.numbers is not None:
            self.numbers.begin()

        with bar("update", len(samples) * self.section.epochs, "samples") as progress:
            updates = [self._update(part, progress) for part in minibatches(samples, self.section)]

        self.packed.clear()
        first = {}
        if updates and "actor/ppo_kl" in updates[0]:
            first = {
                "actor/ppo_kl_first": updates[0]["actor/ppo_kl"],
                "actor/logprob_diff_max": updates[0]["actor/logprob_diff_max"],
            }

        self.steps += 1
        if self.numbers is not None and num_processes() > 1:
            for rank_numbers in gather(self.numbers.items()):
                self.numbers.add(rank_numbers)

        if self.roles.reference is not None:
            self.roles.reference.follow(self.model, self.steps)

        return over_updates(of_first_update(updates)) | first

    def _update(self, samples: list[Sample], progress: ProgressBar) -> dict[str, float]:
        """Makes one optimizer step of the policy over a minibatch, and one of the critic."""
        batches, nulls = self._pack(samples)
        update_batches = [(indices, self.replay.in_update(batch)) for indices, batch in batches]
        critic = self.roles.critic
        metrics = {}
        if critic is not None and (self.is_critic_pretraining or not critic.shared):
            metrics = critic.update(
                [b for _, b in (update_batches if critic.shared else batches)], nulls
            )
            if not critic.shared:
                self._count_critic_flops(samples, batches)

        if self.is_critic_pretraining:
            return metrics | self.flops.take()

        lr = self.optimization.begin()
        entropy_coef = self._entropy_coef()
        kl_coef = self.kl.coef

        shared_critic = critic if critic is not None and critic.shared else None
        if shared_critic is not None:
            metrics["critic/lr"] = shared_critic.optimization.begin()

        num_tokens = sum(s.num_trained for s in samples)
        weights = self.objective.row_weights(samples)
        statistics = self.objective.statistics(self.model, [b for _, b in update_batches], nulls)
        if self.balance is not None:
            self.balance.begin(samples)
        sums = defaultdict[str, float](float)
        largest_diff = 0.0
        for indices, batch in update_batches:
            self.flops.count_training([samples[i] for i in indices], batch)
            with (
                phase("forward"),
                OutputListener(self.model, batch)
                if shared_critic is not None
                else nullcontext() as listener,
            ):
                loss, token_sums = self.objective.loss(
                    self.model,
                    batch,
                    weights[indices],
                    kl_coef=kl_coef,
                    entropy_coef=entropy_coef,
                    statistics=statistics,
                    listen=self._listener([samples[i] for i in indices]),
                    balance=self.balance,
                )

            if shared_critic is not None and listener is not None:
                values = shared_critic.values_of(listener.hidden, batch)
                value_loss, value_sums = shared_critic.loss(values, batch, num_tokens)
                loss = loss + shared_critic.section.coef * value_loss
                token_sums = token_sums | value_sums

            self.optimization.backward(loss)
            largest_diff = max(largest_diff, token_sums.pop("largest_diff"))
            for key, value in token_sums.items():
                sums[key] += value

            progress.advance(len(indices))

        run_null_batches(self.model, nulls, self.optimization.backward)
        norm = self.optimization.finish()
        if shared_critic is not None:
            metrics["critic/grad_norm"] = shared_critic.optimization.finish()

        metrics |= _means(sum_over_ranks(sums)) | {
            "actor/logprob_diff_max": max(gather(largest_diff))
        }
        self.mean_entropy = metrics["actor/entropy"]
        if "actor/kl_loss" in metrics:
            self.kl.update(metrics["actor/kl_loss"], len(samples))
            metrics["actor/kl_coef"] = kl_coef

        return (
            metrics
            | self.flops.take()
            | {"actor/grad_norm": norm, "actor/lr": lr, "actor/entropy_coef": entropy_coef}
        )

    def _pack(
        self, samples: list[Sample]
    ) -> tuple[list[tuple[list[int], PackedBatch]], list[PackedBatch]]:
        """This rank's micro-batches, and its null batches."""
        device = device_of(self.model)
        merge = shares_prefixes(self.model, self.section.prefix_merging)
        batches = micro_batches(
            samples,
            self.section.micro_batch_tokens,
            device,
            merge=merge,
            packed=self.packed,
            images=self.images,
        )
        nulls = null_batches(samples, len(batches), device, merge=merge, images=self.images)
        return batches, nulls

    def _count_critic_flops(
        self, samples: Sequence[Sample], batches: Sequence[tuple[list[int], PackedBatch]]
    ) -> None:
        """Counts the operations of a critic's passes."""
        for indices, batch in batches:
            self.flops.count_training([samples[i] for i in indices], batch)

    def _listener(
        self, samples: Sequence[Sample]
    ) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        return None if self.numbers is None else partial(self.numbers.heard, samples)

    def _entropy_coef(self) -> float:
        """The current weight of the entropy bonus, see AlgorithmSection.entropy_target."""
        section = self.algorithm
        if section.entropy_target is None:
            return section.entropy_coef
        if self.mean_entropy is None:
            return 0.0
        return section.entropy_coef * max(0.0, 1.0 - self.mean_entropy / section.entropy_target)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs in addition to the model's weights."""
        return {
            "optimization": self.optimization.state_dict(),
            "steps": self.steps,
            "kl": self.kl.state_dict(),
            "mean_entropy": self.mean_entropy,
            "roles": {name: role.state_dict() for name, role in self._trained_roles().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict, for a model whose weights are already loaded. A model that is
        not in `state` starts from the policy's present weights."""
        self.begin()
        self.optimization.load_state_dict(state["optimization"])
        self.steps = state["steps"]
        self.kl.load_state_dict(state["kl"])
        self.mean_entropy = state["mean_entropy"]

        for name, role in self._trained_roles().items():
            if name in state["roles"]:
                role.load_state_dict(state["roles"][name])

    def _trained_roles(self) -> dict[str, Reference | Critic | ImplicitProcessReward]:
        roles = {
            "reference": self.roles.reference,
            "critic": self.roles.critic,
            "process_reward": self.roles.process_reward,
        }
        return {name: role for name, role in roles.items() if role is not None}


_WEIGHTED = ("actor/pg_loss", "actor/router_aux_loss")
"""Metrics whose parts have the weights of a mean already."""


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Means over tokens from sums over tokens; counts stay sums."""
    count = sums.pop("count")
    squares = sums.pop("actor/rollout_is_squares", None)
    sizes_by_age = effective_sizes(sums)

    means = {
        key: (value if key.startswith("trainer/") or key in _WEIGHTED else value / count)
        for key, value in sums.items()
    }
    means |= sizes_by_age
    if squares is not None:
        total = sums["actor/rollout_is_mean"]
        means["actor/ess"] = total * total / (count * squares) if squares > 0 else 0.0

    return means
