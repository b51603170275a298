"""The trainer: samples in, one policy update and its metrics out. It never calls an agent or an engine.

loss = sum over trained tokens of weight * (clipped surrogate + kl_coef * KL - entropy_coef * entropy), weights from the aggregation over
the whole minibatch; micro-batches only add up its gradient. The learning rate of optimizer step t warms up linearly, then follows the
schedule.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.policy_loss import aggregation_weights, kl_k3, ppo_clip
from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.packing import PackedBatch, pack, split_by_tokens
from agentevo.types import Sample


def learning_rate(section: TrainerSection, step: int, total_steps: int) -> float:
    """Of optimizer step `step` (from 0) out of `total_steps`."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.learning_rate
    done = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    share = 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.learning_rate * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * share)


def make_optimizer(model: PreTrainedModel, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


class Trainer:
    """Owns the optimizer of a model that was prepared by `agentevo.models.attention.prepare`."""

    def __init__(self, model: PreTrainedModel, trainer: TrainerSection, algorithm: AlgorithmSection) -> None:
        self.model, self.section, self.algorithm = model, trainer, algorithm
        self.optimizer = make_optimizer(model, trainer.learning_rate, trainer.weight_decay, trainer.betas)
        self.optimizer_steps = 0
        self.total_steps = trainer.steps * trainer.epochs * trainer.minibatches
        self.reference: PreTrainedModel | None = None
        self.mean_entropy: float | None = None
        """Of the last optimizer step's tokens, in nats."""

    def keep_reference(self) -> None:
        """Freezes a copy of the policy as it is now, for the KL term; a no-op without one."""
        if self.algorithm.kl_coef > 0:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One update from a batch of samples: `epochs` passes of `minibatches` optimizer steps; groups stay whole.

        Raises TrainingError, before the weights change, if the loss or the gradient is not finite.
        """
        sums: dict[str, float] = defaultdict(float)
        groups = sorted({s.group_id for s in samples})
        updates = 0
        for _ in range(self.section.epochs):
            for part in range(min(self.section.minibatches, len(groups))):
                chosen = set(groups[part :: self.section.minibatches])
                for key, value in self._update([s for s in samples if s.group_id in chosen], first=updates == 0).items():
                    sums[key] += value
                updates += 1
        first = {key: sums.pop(key) for key in ("actor/ppo_kl_first", "actor/logprob_diff_max")} if updates else {}
        tokens = {key: sums.pop(key) for key in list(sums) if key.startswith("trainer/")}
        return {key: value / updates for key, value in sums.items()} | tokens | first

    def _update(self, samples: list[Sample], *, first: bool) -> dict[str, float]:
        """One optimizer step over a minibatch."""
        lr = learning_rate(self.section, self.optimizer_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        weights = aggregation_weights(self.algorithm.aggregation, [sum(s.loss_mask) for s in samples])
        entropy_coef = self._entropy_coef()
        device = next(self.model.parameters()).device
        sums: dict[str, float] = defaultdict(float)
        largest_diff = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for indices in split_by_tokens(samples, self.section.micro_batch_tokens):
            batch = pack([samples[i] for i in indices], [weights[i] for i in indices], device)
            loss, metrics = self._loss(batch, entropy_coef)
            if not torch.isfinite(loss):
                raise TrainingError(
                    "the loss is not finite, the weights were not changed: lower trainer.learning_rate, or check the rewards"
                )
            loss.backward()
            largest_diff = max(largest_diff, metrics.pop("largest_diff"))
            for key, value in metrics.items():
                sums[key] += value
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.section.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError("the gradient is not finite, the weights were not changed: lower trainer.learning_rate")
        self.optimizer.step()
        self.optimizer_steps += 1
        count = sums.pop("count")
        self.mean_entropy = sums["actor/entropy"] / count
        metrics = {key: (value if key.startswith("trainer/") or key == "actor/pg_loss" else value / count) for key, value in sums.items()}
        extra = {"actor/ppo_kl_first": metrics["actor/ppo_kl"], "actor/logprob_diff_max": largest_diff} if first else {}
        return metrics | extra | {"actor/grad_norm": norm, "actor/lr": lr, "actor/entropy_coef": entropy_coef}

    def _entropy_coef(self) -> float:
        """The weight of the entropy bonus now; see AlgorithmSection.entropy_target."""
        section = self.algorithm
        if section.entropy_target is None:
            return section.entropy_coef
        if self.mean_entropy is None:
            return 0.0
        return section.entropy_coef * max(0.0, 1.0 - self.mean_entropy / section.entropy_target)

    def _loss(self, batch: PackedBatch, entropy_coef: float) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's part of the minibatch loss, and sums over its tokens for the metrics."""
        section = self.algorithm
        logp, row_entropy = batch.forward(self.model)
        entropy = row_entropy[batch.rows]  # [M]
        surrogate, clipped = ppo_clip(logp, batch.old_logprobs, batch.advantages, clip_low=section.clip_low, clip_high=section.clip_high)
        loss = (batch.weights * surrogate).sum()
        log_ratio = (logp - batch.old_logprobs).detach()
        metrics = {
            "count": float(len(logp)),
            "actor/pg_loss": float(loss.detach()),
            "actor/entropy": float(entropy.detach().sum()),
            "actor/pg_clipfrac": float(clipped.sum()),
            "actor/ppo_kl": float(-log_ratio.sum()),
            "largest_diff": float(log_ratio.abs().max()),
            "trainer/distinct_tokens": float(batch.num_distinct),
            "trainer/logical_tokens": float(batch.num_logical),
            "trainer/trained_tokens": float(len(logp)),
        }
        if self.reference is not None:
            with torch.no_grad():
                ref_logp, _ = batch.forward(self.reference)
            kl = kl_k3(logp, ref_logp)
            loss = loss + section.kl_coef * (batch.weights * kl).sum()
            metrics["actor/kl_loss"] = float(kl.detach().sum())
        if entropy_coef > 0:
            loss = loss - entropy_coef * (batch.weights * entropy).sum()
        return loss, metrics

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model's weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "mean_entropy": self.mean_entropy,
            "reference": self.reference.state_dict() if self.reference is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict, for a model whose weights are already loaded."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer_steps = state["optimizer_steps"]
        self.mean_entropy = state["mean_entropy"]
        if state["reference"] is not None:
            self.keep_reference()
            assert self.reference is not None
            self.reference.load_state_dict(state["reference"])
