"""The trainer: samples in, one policy update and its metrics out. It never calls an agent or an engine.

What is minimised is `objective.py`; the learning rate of optimizer step t warms up linearly, then follows the schedule.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.algorithms.divergence import AdaptiveKL, FixedKL, KLController
from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.objective import Objective
from agentevo.training.packing import pack, split_by_tokens
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
        self.objective = Objective(algorithm)
        self.optimizer = make_optimizer(model, trainer.learning_rate, trainer.weight_decay, trainer.betas)
        self.steps = 0
        self.optimizer_steps = 0
        self.total_steps = trainer.steps * trainer.epochs * trainer.minibatches
        self.reference: PreTrainedModel | None = None
        self.kl: KLController = FixedKL(algorithm.kl_coef)
        if algorithm.kl_target is not None:
            self.kl = AdaptiveKL(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.mean_entropy: float | None = None
        """Of the last optimizer step's tokens, in nats."""

    def keep_reference(self) -> None:
        """Makes a copy of the policy as it is now the reference of the KL term; a no-op without one."""
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
        self._move_reference()
        first = {key: sums.pop(key) for key in ("actor/ppo_kl_first", "actor/logprob_diff_max")} if updates else {}
        tokens = {key: sums.pop(key) for key in list(sums) if key.startswith("trainer/")}
        return {key: value / updates for key, value in sums.items()} | tokens | first

    def _update(self, samples: list[Sample], *, first: bool) -> dict[str, float]:
        """One optimizer step over a minibatch."""
        lr = learning_rate(self.section, self.optimizer_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        weights, entropy_coef, kl_coef = self.objective.row_weights(samples), self._entropy_coef(), self.kl.coef
        device = next(self.model.parameters()).device
        parts = split_by_tokens(samples, self.section.micro_batch_tokens)
        batches = [pack([samples[i] for i in indices], device) for indices in parts]
        statistics = self.objective.statistics(self.model, batches)
        sums: dict[str, float] = defaultdict(float)
        largest_diff = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for indices, batch in zip(parts, batches, strict=True):
            loss, metrics = self.objective.loss(
                self.model,
                batch,
                weights[indices],
                reference=self.reference,
                kl_coef=kl_coef,
                entropy_coef=entropy_coef,
                statistics=statistics,
            )
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
        metrics = {key: (value if key.startswith("trainer/") or key == "actor/pg_loss" else value / count) for key, value in sums.items()}
        self.mean_entropy = metrics["actor/entropy"]
        if self.reference is not None:
            self.kl.update(metrics["actor/kl_loss"], len(samples))
            metrics["actor/kl_coef"] = kl_coef
        extra = {"actor/ppo_kl_first": metrics["actor/ppo_kl"], "actor/logprob_diff_max": largest_diff} if first else {}
        return metrics | extra | {"actor/grad_norm": norm, "actor/lr": lr, "actor/entropy_coef": entropy_coef}

    @torch.no_grad()
    def _move_reference(self) -> None:
        """After an RL step: see AlgorithmSection.reference."""
        self.steps += 1
        if self.reference is None or self.algorithm.reference == "frozen":
            return
        share = 1.0 - self.algorithm.reference_decay
        if self.algorithm.reference == "synced":
            share = float(self.steps % self.algorithm.reference_every == 0)
        if share:
            for ours, policy in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                ours.lerp_(policy, share)

    def _entropy_coef(self) -> float:
        """The weight of the entropy bonus now; see AlgorithmSection.entropy_target."""
        section = self.algorithm
        if section.entropy_target is None:
            return section.entropy_coef
        if self.mean_entropy is None:
            return 0.0
        return section.entropy_coef * max(0.0, 1.0 - self.mean_entropy / section.entropy_target)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model's weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "optimizer_steps": self.optimizer_steps,
            "kl": self.kl.state_dict(),
            "mean_entropy": self.mean_entropy,
            "reference": self.reference.state_dict() if self.reference is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict, for a model whose weights are already loaded."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.optimizer_steps = state["steps"], state["optimizer_steps"]
        self.kl.load_state_dict(state["kl"])
        self.mean_entropy = state["mean_entropy"]
        if state["reference"] is not None:
            self.keep_reference()
            assert self.reference is not None
            self.reference.load_state_dict(state["reference"])
