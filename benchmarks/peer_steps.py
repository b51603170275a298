"""Optimizer steps of a Hugging Face Trainer, one for each request; runs in a peer's virtual
environment.

    request: the settings that the trainer of this step is to have
    answer:  {"seconds": of the step, "loss": sum of what its micro-batches were differentiated by,
              "grad_norm": before clipping, "peak_bytes": peak of resident memory,
              "state_bytes": weights, gradients and optimizer, "library_bytes": before the model}

The trainer's own loop runs, held between two steps until the next request; other settings end it
and a new trainer begins, from the same weights. Its first step is short and has learning rate 0
(`FIRST_STEP`): it makes the optimizer's state and leaves the weights as they are.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from memory import reset_peak, resident_bytes
from peer_worker import Line

FIRST_STEP: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}
"""Arguments of the trainer: the learning rate is 0 at step 0, and the full one from then on."""
FIRST_STEP_TOKENS = 16
"""The worker's trainer cuts its sequences to so many tokens while `state.global_step` is 0."""
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "max_steps": 1_000_000,
    "logging_steps": 1_000_000,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}
"""Arguments of the trainer: float32 on the CPU, and nothing is written."""


class Watched:
    """Mixin for a Trainer: what each of its optimizer steps was."""

    losses: list[float]
    grad_norm: float

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(float(loss))
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]
        self.grad_norm = float(norm)
        return norm


class Clock(TrainerCallback):
    """Times the steps of one trainer for as long as requests ask for its settings."""

    trainer: Any

    def __init__(
        self,
        line: Line,
        requests: Iterator[dict[str, Any]],
        settings: dict[str, Any],
        library_bytes: int,
    ) -> None:
        self.line = line
        self.requests = requests
        self.settings = settings
        self.library_bytes = library_bytes
        self.next: dict[str, Any] | None = settings
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.losses = []
        reset_peak()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            return

        self.line.reply(
            {
                "seconds": time.perf_counter() - self.started,
                "loss": sum(self.trainer.losses),
                "grad_norm": self.trainer.grad_norm,
                "peak_bytes": resident_bytes("VmHWM"),
                "state_bytes": state_bytes(self.trainer.model, self.trainer.optimizer),
                "library_bytes": self.library_bytes,
            }
        )
        self.next = next(self.requests, None)
        control.should_training_stop = self.next != self.settings


def state_bytes(model: Any, optimizer: Any) -> int:
    """Weights, gradients of those that are trained, and all tensors of the optimizer."""
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer = optimizer.optimizer

    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "nbytes")
    ]
    return sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters()) + sum(
        t.nbytes for t in tensors
    )


def serve(
    line: Line, description: dict[str, Any], make_trainer: Callable[[dict[str, Any], Clock], Any]
) -> None:
    """Answers requests until there are no more. make_trainer(settings, callback): a Watched
    Trainer."""
    library_bytes = reset_peak()
    requests = line.requests(description)
    request = next(requests, None)
    while request is not None:
        clock = Clock(line, requests, request, library_bytes)
        clock.trainer = make_trainer(request, clock)
        clock.trainer.train()
        request = clock.next
        del clock
        gc.collect()  # the trainer is in cycles; two at once would count as the second's memory
