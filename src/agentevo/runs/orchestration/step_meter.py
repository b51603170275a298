"""Measures a step while it runs: the seconds of its phases, and the growth of the engine's
counters. The step's row of metrics is made of these and of its data."""

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
    """See the module. The time in which a version is announced belongs to the next step's row: the
    row of its own step is committed before."""

    def __init__(
        self, parts: Components, source: BatchSource, rollouts: RolloutSource, peak: Peak
    ) -> None:
        self._parts = parts
        self._source = source
        self._rollouts = rollouts
        self._peak = peak
        self._laps: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._begun = 0.0
        self._lap_begun = 0.0
        self._announced_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._begun = self._lap_begun = time.perf_counter()
        self._counters = self._parts.engine_stats()
        self._laps = {}

    def lap(self, name: str) -> None:
        """The phase `name` ends, and the next one begins."""
        now = time.perf_counter()
        self._laps[name] = now - self._lap_begun
        self._lap_begun = now

    def metrics(
        self,
        step: int,
        collected: Collected,
        batch: PreparedBatch,
        updated: Mapping[str, float],
        dropped: Mapping[str, str],
    ) -> dict[str, float]:
        """The step's row. `dropped`: attempt -> why it is not trained on. Called when its last
        phase has ended."""
        timings = {**self._laps, "step": self._lap_begun - self._begun + self._announced_s}
        timings["update_weights"] += self._announced_s
        metrics = step_metrics(step, collected, batch, updated)
        engine = None
        if self._source.samples_rollouts:
            metrics |= self._rollouts.stats() | drop_metrics(dropped)
            engine = counted_since(self._counters, self._parts.engine_stats())

        return metrics | performance_metrics(timings, engine, metrics, self._peak.flops_per_s)

    async def announce(self, step: int) -> None:
        """Other processes may have version `step` from now on."""
        started = time.perf_counter()
        await self._rollouts.announce(step)
        self._announced_s = time.perf_counter() - started
