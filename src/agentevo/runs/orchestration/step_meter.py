"""Measures a step while it runs: the seconds of its phases, and the growth of the engine's
counters. From them and the step's data it computes the step's row of metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentevo.models.compute.device_peak import Peak
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.collect import Collected
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.rollout_sources import RolloutSource
from agentevo.runs.orchestration.step_metrics import (
    counted_since,
    drop_metrics,
    performance_metrics,
    step_metrics,
)
from agentevo.training.learner import PreparedBatch


class StepMeter:
    """Measures one step after another. The time of a version's announcement is in the row of the
    next step, because the row of the version's own step is committed before the announcement."""

    def __init__(
        self, parts: Components, source: BatchSource, rollouts: RolloutSource, peak: Peak
    ) -> None:
        self._parts = parts
        self._source = source
        self._rollouts = rollouts
        self._peak = peak
        self._laps: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._step_started_at = 0.0
        self._lap_started_at = 0.0
        self._announced_s = 0.0

    def begin(self) -> None:
        """Starts the measurement of a step."""
        self._step_started_at = self._lap_started_at = time.perf_counter()
        self._counters = self._parts.engine_stats()
        self._laps = {}

    def lap(self, name: str) -> None:
        """Ends the phase `name`, and begins the next phase."""
        now = time.perf_counter()
        self._laps[name] = now - self._lap_started_at
        self._lap_started_at = now

    def metrics(
        self,
        step: int,
        collected: Collected,
        batch: PreparedBatch,
        updated: Mapping[str, float],
        dropped: Mapping[str, str],
    ) -> dict[str, float]:
        """The step's row, after the end of its last phase. `dropped`: attempt -> the reason why the
        attempt is not trained on."""
        timings = {
            **self._laps,
            "step": self._lap_started_at - self._step_started_at + self._announced_s,
        }
        timings["update_weights"] += self._announced_s
        metrics = step_metrics(step, collected, batch, updated)
        engine = None
        if self._source.samples_rollouts:
            metrics |= self._rollouts.stats() | drop_metrics(dropped)
            engine = counted_since(self._counters, self._parts.engine_stats())

        return metrics | performance_metrics(timings, engine, metrics, self._peak.flops_per_s)

    async def announce(self, step: int) -> None:
        """Announces version `step` to other processes, and measures the time."""
        started = time.perf_counter()
        await self._rollouts.announce(step)
        self._announced_s = time.perf_counter() - started
