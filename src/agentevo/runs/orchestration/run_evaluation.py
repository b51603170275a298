"""The evaluations of a run: the policy on held-out tasks or data, logged and shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext

from agentevo.observability import LiveView
from agentevo.runs.folder.creation import RunCommand
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.evaluation import (
    Evaluated,
    check_first_attempts,
    evaluate,
    reference_players,
    solved_share,
)
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.runtime.signals import finishes_before_stop
from agentevo.training.phases import phase


class RunEvaluation:
    """See the module. `players`: the reference players on the held-out tasks, if there are any."""

    def __init__(
        self,
        parts: Components,
        source: BatchSource,
        record: RunRecord,
        view: LiveView,
        is_stopped: Callable[[], bool],
        command: RunCommand,
    ) -> None:
        self._parts = parts
        self._source = source
        self._record = record
        self._view = view
        self._is_stopped = is_stopped
        self._command = command
        self._has_played = False
        self.players = reference_players(parts)

    def is_due(self, step: int) -> bool:
        """Whether the recipe asks for an evaluation after this step."""
        every = self._parts.config.evaluation.every
        return bool(every) and step % every == 0

    def value_of(self, metrics: dict[str, float]) -> float | None:
        """The value by which the best checkpoint is chosen; None if nothing is held out."""
        return solved_share(metrics) if self._parts.plays else self._source.value(metrics)

    async def rate(self, name: str, *, full: bool) -> float | None:
        """Makes an evaluation, and counts it as one of the progress. Returns its value. Raises as
        `evaluate`."""
        progress = self._record.progress
        progress.after = await self.evaluate(name, full=full)
        value = self.value_of(progress.after)
        progress.rate(value)
        return value

    async def evaluate(self, name: str, *, full: bool, label: str = "") -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds the sampled attempts.
        `label` distinguishes two evaluations of one step. Raises StopAskedError if the user asks to
        stop during the evaluation."""
        self._view.phase("evaluating", name)
        started = time.perf_counter()

        progress = self._record.progress
        step = progress.step
        with phase("evaluation"):
            held_out = self._source.evaluate(self._is_stopped)
            played: dict[str, float] = {}
            evaluated = None
            if self._parts.plays:
                evaluated = await self._play(step, full=full, label=label)
                played = evaluated.metrics
                progress.generated_tokens += evaluated.num_tokens

        metrics = held_out | played
        if held_out:
            texts = (
                f"{key.rpartition('/')[2].replace('_', ' ')} {value:.4g}"
                for key, value in held_out.items()
            )
            self._view.note(f"held-out conversations at step {step}: {', '.join(texts)}")

        self._record.log.log(step, metrics | {"timing_s/testing": time.perf_counter() - started})
        if evaluated is not None:
            if not progress.begun:
                check_first_attempts(
                    self._parts,
                    "the first evaluation",
                    evaluated.errors,
                    evaluated.num_attempts,
                    self._command,
                    self._record.head,
                )
            notes = evaluated.notes(self._parts.config, is_first=not self._has_played)
            self._view.evaluation(step, metrics, notes)
            self._has_played = True

        return metrics

    async def _play(self, step: int, *, full: bool, label: str) -> Evaluated:
        """Plays the evaluation's attempts."""
        run_engines = self._parts.run_engines
        async with nullcontext() if run_engines is None else run_engines.with_repairs():
            samples = self._parts.config.evaluation.samples if full else 0
            work = asyncio.create_task(
                evaluate(self._parts, step, samples=samples, players=self.players, label=label)
            )
            if not await finishes_before_stop(work, self._is_stopped):
                raise StopAskedError("stopped while evaluating")
            return work.result()
