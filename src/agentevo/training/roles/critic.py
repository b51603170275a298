"""The critic estimates the expected return before each token is chosen.

Its own model (a copy of the policy with a head of one output) or a head on the policy's last hidden
states. The head starts at 0, so an untrained critic predicts 0. With a policy that has adapters,
its own model is another set of adapters on the same base.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.value import value_loss
from agentevo.config import CriticSection, MemorySection, TrainerSection
from agentevo.models.compute.parameters import trained_parameters
from agentevo.models.files.model_copy import copy_policy
from agentevo.models.token_rows import causal_model
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.kernels.output_layer import all_logits, last_hidden
from agentevo.training.optimization import Optimization
from agentevo.training.parallel import gather, sum_over_ranks
from agentevo.training.phases import phase
from agentevo.training.roles.role_weights import TrainedRole
from agentevo.training.sharding.layouts import layouts_of


class Critic(TrainedRole):
    """A value model; see the module. It is trained with `value_loss`, a mean over tokens, from the
    columns `returns` and `values` of the samples."""

    def __init__(
        self,
        policy: PreTrainedModel,
        section: CriticSection,
        trainer: TrainerSection,
        memory: MemorySection | None = None,
    ) -> None:
        self.section = section
        self.shared = section.trunk == "shared"
        parameter = next(policy.parameters())
        self.head = torch.nn.Linear(
            policy.config.get_text_config().hidden_size,
            1,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

        self.model = policy
        trained: torch.nn.Module = self.head
        if not self.shared:
            self.model = trained = copy_policy(policy, self._behead)

        self.weights = trained_parameters(trained)
        self.optimization = Optimization(
            trained.parameters(),
            trainer,
            memory=memory,
            learning_rate=section.learning_rate,
            key="critic",
            layouts=layouts_of(trained),
        )

    def _behead(self, twin: PreTrainedModel) -> None:
        """Replaces the output layer of a copy of the policy by the head."""
        inner = causal_model(twin)
        inner.set_output_embeddings(self.head)
        inner.config.get_text_config().final_logit_softcapping = None  # values have no bound

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """[M] float32: the values by the critic's own pass; differentiable."""
        if not self.shared:
            return all_logits(self.model, batch).squeeze(-1)[batch.rows].float()
        return self.values_of(last_hidden(self.model, batch), batch)

    def values_of(self, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """[M] float32: the values from the policy's last hidden states [R, H] at the nodes that
        predict."""
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)[batch.rows].float()

    def loss(
        self, values: torch.Tensor, batch: PackedBatch, num_tokens: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's part of the loss over `num_tokens` of the minibatch, and sums over its
        tokens for the metrics. values [M]."""
        count = int(batch.mask.sum())
        loss, measured = value_loss(
            batch.table(values),
            batch.columns["returns"],
            batch.mask,
            old_values=batch.columns["values"],
            clip=self.section.clip,
            weights=batch.mask / num_tokens,
        )
        metrics = {"critic/vf_loss": float(loss.detach()) * num_tokens}
        metrics |= {
            f"critic/{key}": float(measured[key]) * count for key in ("vf_clipfrac", "value_mean")
        }
        return loss, metrics

    def update(
        self, batches: Sequence[PackedBatch], nulls: Sequence[PackedBatch] = ()
    ) -> dict[str, float]:
        """One optimizer step over a minibatch, which leaves the policy unchanged: it trains all of
        a separate model, but only the head on a shared trunk. `nulls`: see `null_batches`."""
        num_tokens = sum(gather(sum(int(batch.mask.sum()) for batch in batches)))
        lr = self.optimization.begin()

        sums: dict[str, float] = {}
        for batch in batches:
            with phase("forward"):
                loss, metrics = self.loss(self._trained_values(batch), batch, num_tokens)
            self.optimization.backward(loss)
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value

        for batch in nulls:
            self.optimization.backward(0.0 * self._trained_values(batch).sum())

        norm = self.optimization.finish()
        return {key: value / num_tokens for key, value in sum_over_ranks(sums).items()} | {
            "critic/grad_norm": norm,
            "critic/lr": lr,
        }

    def _trained_values(self, batch: PackedBatch) -> torch.Tensor:
        if not self.shared:
            return self.values(batch)
        with torch.no_grad():
            hidden = last_hidden(self.model, batch)
        return self.values_of(hidden, batch)
