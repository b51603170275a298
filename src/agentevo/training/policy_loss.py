"""The loss that an update minimises, for any algorithm that `presets.resolve_preset` can
name:

    loss = sum over trained tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy)

Weights come from the aggregation over the whole minibatch, and so do the statistics that some
losses select tokens by: micro-batches only add up the gradient, however the minibatch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.aggregation import bind_aggregation
from agentevo.algorithms.divergence import bind_kl
from agentevo.algorithms.importance import age_decay
from agentevo.algorithms.loss_inputs import LossTables, bounded_exp
from agentevo.algorithms.losses import bind_policy_loss
from agentevo.config import AlgorithmSection
from agentevo.training.algorithm_functions import bound_loss
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.staleness import AGE, age_sums
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.parallel import gather, num_ranks
from agentevo.training.phases import phase
from agentevo.training.router_balance import RouterBalance, listening
from agentevo.training.routing_replay import mismatches
from agentevo.types import Sample


class MinibatchLoss:
    """The loss of a minibatch, a micro-batch at a time. The recipe's names and hyper-parameters are
    resolved and checked here, once."""

    def __init__(self, section: AlgorithmSection) -> None:
        algorithm = section.resolve()
        self.policy_loss = bind_policy_loss(
            algorithm.policy_loss,
            algorithm.loss_hyper,
            aggregation=algorithm.aggregation,
            importance=section.importance,
            importance_cap=section.importance_cap,
            importance_floor=section.importance_floor,
            function=bound_loss(section),
        )
        self.age_power = section.importance_age_power
        self.aggregation = bind_aggregation(algorithm.aggregation, algorithm.aggregation_hyper)
        self.kl = bind_kl(section.kl) if section.kl_in == "loss" and section.kl_coef > 0 else None

    def row_weights(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[S] float32: the weight of each trained token of each sample of a minibatch."""
        lengths = torch.tensor([s.num_trained for s in samples])
        return self.aggregation(lengths, [s.trajectory_id for s in samples]).float()

    @torch.no_grad()
    def statistics(
        self,
        model: PreTrainedModel,
        batches: Sequence[PackedBatch],
        nulls: Sequence[PackedBatch] = (),
    ) -> dict[str, float]:
        """The statistics of the whole minibatch that the policy loss needs beforehand. Nothing is
        computed for losses that need no statistics (most of them), or if one micro-batch is the
        whole minibatch. `nulls`: see `null_batches`."""
        if self.policy_loss.statistics_of is None or (len(batches) == 1 and num_ranks() == 1):
            return {}

        local_tables = []
        for batch in batches:
            with phase("forward"):
                logp, _ = token_logprobs(model, batch)
            tables = (batch.table(logp), batch.old_logprobs, batch.advantages, batch.mask)
            local_tables.append([table.cpu() for table in tables])

        for batch in nulls:
            token_logprobs(model, batch)

        parts = [part for of_rank in gather(local_tables) for part in of_rank]
        width = max(part[0].shape[1] for part in parts)
        minibatch_tables = [
            torch.cat(
                [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in column]
            )
            for column in zip(*parts, strict=True)
        ]
        return self.policy_loss.statistics(LossTables(*minibatch_tables))

    def loss(
        self,
        model: PreTrainedModel,
        batch: PackedBatch,
        weights: torch.Tensor,
        *,
        kl_coef: float,
        entropy_coef: float,
        statistics: Mapping[str, float],
        listen: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        balance: RouterBalance | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's part of the loss, and sums over its tokens for the metrics. `weights`
        [S] are the weights of the batch's rows, see `row_weights`. `listen` is called with the
        log-probs and entropies, [S, T]. `balance` adds the routers' loss."""
        if balance is not None:
            batch = batch.with_all_rows()
        with listening(balance, batch) as routers:
            chosen_logp, node_entropy = token_logprobs(model, batch)  # [M], [R]
        logp = batch.table(chosen_logp)  # [S, T]
        entropy = node_entropy[batch.rows]  # [M]
        if listen is not None:
            listen(logp.detach(), batch.table(entropy.detach()))

        tables = LossTables(
            logp,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            rollout_logp=batch.rollout_logprobs,
            proximal_logp=batch.old_logprobs,
        )
        token_losses, measured = self.policy_loss(tables, statistics)
        if self.age_power and AGE in batch.columns:  # without ages all tokens are fresh
            decay = age_decay(batch.columns[AGE].to(logp.dtype), self.age_power)
            token_losses = token_losses * decay
            measured["rollout_is_mean"] = measured["rollout_is_mean"] * decay

        token_weights = weights.to(logp.device)[:, None] * batch.mask
        loss = (token_weights * token_losses).sum()

        metrics = {f"actor/{name}": float(values.sum()) for name, values in measured.items()}
        if "rollout_is_mean" in measured:
            metrics["actor/rollout_is_squares"] = float(measured["rollout_is_mean"].square().sum())

        metrics |= {
            "count": float(len(chosen_logp)),
            "actor/pg_loss": float(loss.detach()),
            "actor/entropy": float(entropy.detach().sum()),
            "largest_diff": float((logp - batch.old_logprobs).detach().abs().max()),
            "trainer/distinct_tokens": float(batch.num_distinct),
            "trainer/logical_tokens": float(batch.num_logical),
            "trainer/trained_tokens": float(len(chosen_logp)),
            **mismatches(batch),
        }
        if AGE in batch.columns:
            off_policy = _off_policy(logp, batch, measured)
            metrics |= age_sums(off_policy[batch.mask], batch.columns[AGE][batch.mask])

        if self.kl is not None:
            distance = self.kl(logp, batch.columns["ref_logp"], batch.mask)
            loss = loss + kl_coef * (token_weights * distance).sum()
            metrics["actor/kl_loss"] = float(distance.detach().sum())

        if entropy_coef > 0:
            of_token = weights.to(entropy.device)[batch.samples]
            loss = loss - entropy_coef * (of_token * entropy).sum()

        if routers is not None:
            router_loss = routers.loss()
            loss = loss + routers.coef * router_loss
            metrics["actor/router_aux_loss"] = float(router_loss.detach())

        return loss, metrics


def _off_policy(
    logp: torch.Tensor, batch: PackedBatch, measured: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """[S, T]: the importance weight, after caps, with which the loss corrects for tokens that
    another policy sampled. If the loss has no such weight: the ratio of the policy to the one that
    sampled."""
    if "rollout_is_mean" in measured:
        return measured["rollout_is_mean"]
    return bounded_exp(logp.detach() - batch.rollout_logprobs)
