"""What an update minimises, for any algorithm that `catalogue.presets.resolve_preset` can name:

    loss = sum over trained tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy)

Weights come from the aggregation over the whole minibatch, and so do the statistics that some
losses select tokens by: micro-batches only add up the gradient, however the minibatch is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.aggregation import aggregation_weights
from agentevo.algorithms.divergence import kl
from agentevo.algorithms.loss_inputs import bounded_exp
from agentevo.algorithms.losses import STATISTICS, batch_statistics, policy_loss_terms
from agentevo.config import AlgorithmSection
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.staleness import AGE, age_sums
from agentevo.training.parallel import gathered, num_ranks
from agentevo.training.phases import phase
from agentevo.types import Sample


class Objective:
    """The loss of a minibatch, part by part."""

    def __init__(self, section: AlgorithmSection) -> None:
        self.section, self.algorithm = section, section.resolved()

    def row_weights(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[S] float32: what each trained token of each sample of a minibatch weighs."""
        lengths = torch.tensor([sum(s.loss_mask) for s in samples])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        names = [s.trajectory_id for s in samples]
        found = aggregation_weights(
            self.algorithm.aggregation,
            mask,
            trajectory_ids=names,
            **self.algorithm.aggregation_hyper,
        )
        return found.amax(dim=1)

    @torch.no_grad()
    def statistics(
        self, model: PreTrainedModel, batches: Sequence[PackedBatch]
    ) -> dict[str, float]:
        """What the loss has to know of the whole minibatch beforehand: most losses nothing, then
        nothing is computed."""
        if self.algorithm.policy_loss not in STATISTICS or (len(batches) == 1 and num_ranks() == 1):
            return {}
        own = []
        for batch in batches:
            with phase("forward"):
                logp, _ = batch.forward(model)
            tables = [
                batch.table(values) for values in (logp, batch.old_logprobs, batch.advantages)
            ]
            own.append([table.cpu() for table in (*tables, batch.mask)])
        parts = [part for of_rank in gathered(own) for part in of_rank]
        width = max(part[0].shape[1] for part in parts)
        logp, old_logp, advantages, mask = (
            torch.cat(
                [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in column]
            )
            for column in zip(*parts, strict=True)
        )
        return batch_statistics(
            self.algorithm.policy_loss,
            logp=logp,
            old_logp=old_logp,
            advantages=advantages,
            mask=mask,
            **self.algorithm.loss_hyper,
        )

    def loss(
        self,
        model: PreTrainedModel,
        batch: PackedBatch,
        weights: torch.Tensor,
        *,
        kl_coef: float,
        entropy_coef: float,
        statistics: Mapping[str, float],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's part of the loss, and sums over its tokens for the metrics. weights [S
        of the batch]."""
        flat_logp, row_entropy = batch.forward(model)
        flat_entropy = row_entropy[batch.rows]  # [M]
        logp = batch.table(flat_logp)  # [S, T]
        terms, found = self._terms(logp, batch, statistics)
        token_weights = weights.to(terms.device)[:, None] * batch.mask
        loss = (token_weights * terms).sum()
        metrics = {f"actor/{name}": float(values.sum()) for name, values in found.items()}
        if "rollout_is_mean" in found:
            metrics["actor/rollout_is_squares"] = float(found["rollout_is_mean"].square().sum())
        metrics |= {
            "count": float(len(flat_logp)),
            "actor/pg_loss": float(loss.detach()),
            "actor/entropy": float(flat_entropy.detach().sum()),
            "largest_diff": float((flat_logp - batch.old_logprobs).detach().abs().max()),
            "trainer/distinct_tokens": float(batch.num_distinct),
            "trainer/logical_tokens": float(batch.num_logical),
            "trainer/trained_tokens": float(len(flat_logp)),
        }
        if AGE in batch.columns:
            metrics |= age_sums(self._off_policy(flat_logp, batch, found), batch.columns[AGE])
        if self.section.kl_in == "loss" and self.section.kl_coef > 0:
            distance = kl(self.section.kl, logp, batch.table(batch.columns["ref_logp"]), batch.mask)
            loss = loss + kl_coef * (token_weights * distance).sum()
            metrics["actor/kl_loss"] = float(distance.detach().sum())
        if entropy_coef > 0:
            loss = (
                loss
                - entropy_coef
                * (weights.to(flat_entropy.device)[batch.samples] * flat_entropy).sum()
            )
        return loss, metrics

    def _off_policy(
        self, logp: torch.Tensor, batch: PackedBatch, found: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """[M]: what the loss weighs each token by for having been sampled by another policy, caps
        included; where it does not, the ratio of the policy to the one that sampled."""
        if "rollout_is_mean" in found:
            return found["rollout_is_mean"][batch.samples, batch.places]
        return bounded_exp(logp.detach() - batch.rollout_logprobs)

    def _terms(
        self, logp: torch.Tensor, batch: PackedBatch, statistics: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Token losses [S, T], and what is measured per token."""
        old_logp = batch.table(batch.old_logprobs)
        return policy_loss_terms(
            self.algorithm.policy_loss,
            logp=logp,
            old_logp=old_logp,
            advantages=batch.table(batch.advantages),
            mask=batch.mask,
            rollout_logp=batch.table(batch.rollout_logprobs),
            proximal_logp=old_logp,
            aggregation=self.algorithm.aggregation,
            statistics=statistics,
            importance=self.section.importance,
            importance_cap=self.section.importance_cap,
            importance_floor=self.section.importance_floor,
            **self.algorithm.loss_hyper,
        )
