"""PRIME's process reward, learnt online from outcomes alone (Cui et al., arXiv 2502.01456).

A second model phi starts as the policy; with a policy that has adapters it is another set of
adapters on the same base. Its reward for a token is r(y_t) = beta (log phi(y_t) - log ref(y_t))
(eq. 3); summed over an attempt it is the logit of success, and phi learns by its cross-entropy with
the attempt's real outcome (eq. 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from agentevo.config import MemorySection, ProcessRewardSection, TrainerSection
from agentevo.models.compute.parameters import trained_parameters
from agentevo.models.compute.rows import shares_prefixes
from agentevo.models.files.model_copy import copy_policy
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.passes import (
    backward_through_sums,
    device_of,
    micro_batches,
    null_batches,
)
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.optimization import Optimization
from agentevo.training.roles.role_weights import TrainedRole
from agentevo.training.sharding.layouts import layouts_of
from agentevo.types import Sample


class ImplicitProcessReward(TrainedRole):
    """A model that scores single tokens; see the module."""

    def __init__(
        self,
        policy: PreTrainedModel,
        section: ProcessRewardSection,
        trainer: TrainerSection,
        memory: MemorySection | None = None,
        *,
        images: ImageProvider | None = None,
    ) -> None:
        """`images`: the trainer's."""
        self.images = images
        self.section = section
        self.trainer = trainer
        self.model = copy_policy(policy)
        self.weights = trained_parameters(self.model)
        self.optimization = Optimization(
            self.model.parameters(),
            trainer,
            memory=memory,
            learning_rate=section.learning_rate,
            key="process_reward",
            layouts=layouts_of(self.model),
        )

    def rewards(self, batch: PackedBatch, reference: torch.Tensor) -> torch.Tensor:
        """[M]: the reward of each token, given the reference's log-probs [M]."""
        return self.section.beta * (token_logprobs(self.model, batch)[0] - reference)

    def update(
        self,
        samples: Sequence[Sample],
        owners: Sequence[int],
        reference: torch.Tensor,
        successes: Sequence[bool],
    ) -> dict[str, float]:
        """One optimizer step: owners [S] number the attempts, reference [S, T] log-probs (0 where
        untrained), successes one per attempt."""
        outcome = torch.tensor([float(success) for success in successes])
        offset = torch.zeros(len(outcome)).index_add(0, torch.tensor(owners), reference.sum(1))

        def loss_of(sums: torch.Tensor) -> torch.Tensor:
            logits = self.section.beta * (sums - offset.to(sums.device))
            return torch.nn.functional.binary_cross_entropy_with_logits(
                logits, outcome.to(sums.device)
            )

        lr = self.optimization.begin()
        section = self.trainer
        device = device_of(self.model)
        merge = shares_prefixes(self.model, section.prefix_merging)
        batches = micro_batches(
            samples, section.micro_batch_tokens, device, merge=merge, images=self.images
        )
        nulls = null_batches(samples, len(batches), device, merge=merge, images=self.images)
        loss, sums = backward_through_sums(
            self.model, batches, owners, loss_of, self.optimization.backward, nulls
        )
        norm = self.optimization.finish()
        right = ((sums.cpu() > offset) == (outcome > 0.5)).float().mean()

        return {
            "process_reward/loss": float(loss),
            "process_reward/accuracy": float(right),
            "process_reward/grad_norm": norm,
            "process_reward/lr": lr,
        }
