"""One model's optimizer: AdamW, the learning rate over time, the limit on the gradient, and the refusal of numbers that are not finite.

The learning rate of optimizer step t warms up linearly, then follows the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from agentevo.config import TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.parallel import sum_gradients
from agentevo.training.phases import phase


class Grouped(Protocol):
    """A sample or a pair."""

    @property
    def group_id(self) -> str: ...


T = TypeVar("T", bound=Grouped)


def learning_rate(section: TrainerSection, step: int, total_steps: int, peak: float | None = None) -> float:
    """Of optimizer step `step` (from 0) out of `total_steps`; `peak` in place of the section's own."""
    highest = section.learning_rate if peak is None else peak
    if step < section.warmup_steps:
        return highest * (step + 1) / section.warmup_steps
    done = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    return highest * decay(section.schedule, done, section.min_lr_ratio)


def decay(schedule: str, done: float, min_ratio: float) -> float:
    """What the peak is multiplied by when the share `done` of the steps after the warm-up is over: 1 at first, min_ratio at the end."""
    if schedule == "constant":
        return 1.0
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_ratio + (1.0 - min_ratio) * share


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW over those parameters that are trained; weight decay on matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


class Optimization:
    """`begin`, then backward passes that add up, then `finish`: one optimizer step."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], section: TrainerSection, *, learning_rate: float | None = None, key: str = "trainer"
    ) -> None:
        """`key`: the recipe's section with this learning rate, for messages."""
        self.section, self.key = section, key
        self.peak = section.learning_rate if learning_rate is None else learning_rate
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, self.peak, section.weight_decay, section.betas)
        self.steps = 0
        self.leave_out(0)

    def leave_out(self, steps: int) -> None:
        """So many of the run's steps are none of this model's: its schedule is shorter by them."""
        self.total_steps = (self.section.steps - steps) * self.section.epochs * self.section.minibatches

    def begin(self, lr: float | None = None) -> float:
        """Clears the gradient; returns the learning rate of the step, that of the schedule unless given."""
        if lr is None:
            lr = learning_rate(self.section, self.steps, self.total_steps, self.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    @phase("backward")
    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradient. Raises TrainingError, before any weight changes, if the loss is not finite."""
        if not torch.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the loss is not finite, the weights were not changed: lower {self.key}.learning_rate, or check rewards and data"
            )
        loss.backward()

    @phase("optimizer")
    def finish(self) -> float:
        """Adds up the gradients of all ranks, scales down to max_grad_norm and steps; returns the L2 norm from before. Raises
        TrainingError."""
        sum_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.section.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(f"the gradient is not finite, the weights were not changed: lower {self.key}.learning_rate")
        self.optimizer.step()
        self.steps += 1
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def minibatches(items: Sequence[T], section: TrainerSection) -> Iterator[list[T]]:
    """What each optimizer step of an RL step trains on: `epochs` passes over `minibatches` parts; groups stay whole."""
    groups = sorted({item.group_id for item in items})
    for _ in range(section.epochs):
        for part in range(min(section.minibatches, len(groups))):
            chosen = set(groups[part :: section.minibatches])
            yield [item for item in items if item.group_id in chosen]


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over those updates that have the metric; `trainer/...` are counts, and add up."""
    found: dict[str, list[float]] = {}
    for update in updates:
        for key, value in update.items():
            found.setdefault(key, []).append(value)
    return {key: sum(values) if key.startswith("trainer/") else sum(values) / len(values) for key, values in found.items()}
