"""The whole of a training run, in order: evaluate, then step by step sample -> advantage -> update -> publish -> commit, then evaluate
again.

Version s of the weights is what step s left behind; trajectories of step s + 1 are sampled from it. A step is committed to the store
together with the record of its metrics; a resumed run rewinds the store to its checkpoint and repeats what came after, bit for bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from agentevo.models.device_peak import device_peak
from agentevo.observability import CollapseMonitor, LiveView, MetricsLog
from agentevo.orchestration.collect import Collector
from agentevo.orchestration.components import Components
from agentevo.orchestration.evaluation import evaluate, headline
from agentevo.orchestration.profiling import Profiling
from agentevo.orchestration.step_metrics import drop_metrics, performance_metrics
from agentevo.rollout.sampler import BASELINE
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.phases import phase
from agentevo.types import Baselines


class Progress(msgspec.Struct):
    """What a run has come to; saved with every checkpoint."""

    step: int = 0
    """Committed steps."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    wall_s: float = 0.0
    """Training and evaluation so far, pauses left out."""
    before: dict[str, float] = {}
    """Evaluation after any cold start, before the first step."""
    after: dict[str, float] = {}
    """The newest evaluation."""
    cold_start_before: dict[str, float] = {}
    """Evaluation before the cold start, if there was one."""
    warnings: list[str] = []


class Loop:
    """Runs the steps of one configuration; `stop` asks it to end after the current one."""

    def __init__(
        self,
        parts: Components,
        trainer: Learner,
        checkpoints: Checkpoints,
        log: MetricsLog,
        view: LiveView,
        players: Baselines | None,
        stop: Callable[[], bool],
    ) -> None:
        self.parts, self.trainer, self.checkpoints, self.log, self.view = parts, trainer, checkpoints, log, view
        self.players, self.stop = players, stop
        self.collector = Collector(parts.config, parts.sampler, parts.tasks)
        self.monitor = CollapseMonitor()
        self.progress = Progress()
        self.profiling = Profiling(parts.config.profile, parts.config.run_dir, parts.model, warn=self.warn, note=view.note)
        self.peak = device_peak(self.profiling.device, self.profiling.dtype)
        self._clock = time.perf_counter()

    async def run(self) -> None:
        """From where `progress` stands to the last step, or until `stop`."""
        section = self.parts.config.trainer
        if not self.progress.before:
            self.trainer.begin()
            self.progress.before = self.progress.after = await self.evaluate("before", full=True)
        with self.profiling:
            while self.progress.step < section.steps and not self.stop():
                with self.profiling.step(self.progress.step + 1):
                    await self.step()
                    await self._milestones(last=self.progress.step == section.steps)
        if self.checkpoints.steps()[-1:] != [self.progress.step]:
            self.save()

    async def step(self) -> None:
        """One step, committed at its end."""
        parts, step = self.parts, self.progress.step + 1
        started = time.perf_counter()
        counters = parts.engine.stats()
        self.view.phase("sampling", f"step {step}")
        parts.engine.forget_cache()  # an evaluation before must not change which tokens are computed together: resuming is bit for bit
        with phase("sampling"):
            collected = await self.collector.collect(step)
        sampled = time.perf_counter()

        with phase("prepare"):
            made = self.trainer.prepare(collected.kept, collected.baselines)
        dropped = collected.dropped | made.dropped
        told = {name: reason for name, reason in dropped.items() if reason != BASELINE}
        trained_ids = [t.id for t in collected.kept if t.id not in dropped]
        with phase("store"):
            for reason in sorted(set(dropped.values())):
                await parts.store.drop([t.id for t in collected.trajectories if dropped.get(t.id) == reason], reason)
            await parts.store.reserve(trained_ids, step)
        prepared = time.perf_counter()

        self.view.phase("training", f"step {step}")
        trained = made.metrics | self.trainer.step(made.samples) if made.samples else {}
        updated = time.perf_counter()
        with phase("publish"):
            await parts.engine.publish(step)

        now = time.perf_counter()
        timings = {"gen": sampled - started, "adv": prepared - sampled, "update_actor": updated - prepared, "update_weights": now - updated}
        grown = {key: value - counters.get(key, 0.0) for key, value in parts.engine.stats().items()}
        metrics = {"training/global_step": float(step), **collected.metrics, **drop_metrics(told), **trained}
        metrics |= performance_metrics(timings | {"step": now - started}, grown, trained, self.peak.flops_per_s)
        with phase("store"):
            await parts.store.commit_step(step, {"metrics": metrics}, ids=trained_ids)
        self.progress.step = step
        self.progress.generated_tokens += int(grown["engine/generated_tokens"])
        self.progress.trained_tokens += int(trained.get("trainer/trained_tokens", 0))
        self.log.log(step, metrics)
        for warning in self.monitor.observe(step, metrics):
            self.warn(f"step {warning.step}: {warning.message}")
        self.view.step(step, parts.config.trainer.steps, metrics, Counter(told.values()))

    async def evaluate(self, name: str, *, full: bool, label: str = "") -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds the sampled attempts. `label` tells two of one step apart."""
        self.view.phase("evaluating", name)
        started, before = time.perf_counter(), self.parts.engine.stats()["engine/generated_tokens"]
        samples = self.parts.config.evaluation.samples if full else 0
        with phase("evaluation"):
            metrics = await evaluate(self.parts, self.progress.step, samples=samples, players=self.players, label=label)
        self.progress.generated_tokens += int(self.parts.engine.stats()["engine/generated_tokens"] - before)
        self.log.log(self.progress.step, metrics | {"timing_s/testing": time.perf_counter() - started})
        self.view.evaluation(self.progress.step, metrics)
        return metrics

    def warn(self, text: str) -> None:
        self.progress.warnings.append(text)
        self.view.warn(text)

    def save(self, value: float | None = None) -> None:
        """A checkpoint of the last committed step; `value` is its evaluation, if there was one."""
        self.view.phase("saving", f"checkpoint of step {self.progress.step}")
        self.progress.wall_s += time.perf_counter() - self._clock
        self._clock = time.perf_counter()
        state: dict[str, Any] = {"progress": msgspec.to_builtins(self.progress), "monitor": self.monitor.state_dict()}
        state["collector"] = self.collector.state_dict()
        with phase("checkpoint"):
            self.checkpoints.save(self.progress.step, self.parts.model, self.parts.tokenizer, self.trainer.state_dict(), state, value)

    def restore(self, run_state: dict[str, Any]) -> None:
        """The inverse of what `save` wrote."""
        self.progress = msgspec.convert(run_state["progress"], Progress)
        self.monitor.load_state_dict(run_state["monitor"])
        self.collector.load_state_dict(run_state.get("collector", {}))  # checkpoints from before it had a state have none
        self.parts.engine.set_version(self.progress.step)
        self._clock = time.perf_counter()

    def wall_s(self) -> float:
        return self.progress.wall_s + time.perf_counter() - self._clock

    async def _milestones(self, *, last: bool) -> None:
        """Evaluation and checkpoint, when one is due."""
        config, step = self.parts.config, self.progress.step
        value = None
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            self.progress.after = await self.evaluate("after" if last else f"step {step}", full=last)
            value = headline(self.progress.after)
        due = bool(config.checkpoint.every) and step % config.checkpoint.every == 0
        better = (
            value is not None
            and bool(config.checkpoint.every)
            and (self.checkpoints.best_value is None or value > self.checkpoints.best_value)
        )
        if last or due or better:
            self.save(value)
