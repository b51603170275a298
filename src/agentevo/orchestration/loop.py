"""The whole of a training run, in order: evaluate, then step by step attempts -> advantage ->
update -> publish -> commit, then evaluate again.

Version s of the weights is what step s left behind. Where attempts come from (attempts.py) decides
how far they may be behind the trainer; the rest is the same. A step is committed in one transaction
with its plan (what it trained on, in order), the run's progress and the checkpoint that was saved
of it. So a resumed run loads the newest whole checkpoint, does the committed steps after it again
from their plans (resume.py), and goes on, having lost nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from agentevo.models.device_peak import device_peak
from agentevo.observability import CollapseMonitor, LiveView, MetricsLog
from agentevo.orchestration.collect import Collected, Collector
from agentevo.orchestration.components import Components
from agentevo.orchestration.evaluation import evaluate, headline
from agentevo.orchestration.profiling import Profiling
from agentevo.orchestration.rollout_sources import RolloutSource, StopAskedError
from agentevo.orchestration.step_metrics import drop_metrics, performance_metrics
from agentevo.retry import STORE_RETRY_S, with_retries
from agentevo.rollout.sampler import BASELINE
from agentevo.training.batching.step_plan import KEY, Plan
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner, Made
from agentevo.training.phases import phase
from agentevo.types import Baselines


class Progress(msgspec.Struct):
    """What a run has come to; saved with every step and every checkpoint (with a step: only the
    warnings since the one before, or a long run's records would grow with every step)."""

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
        attempts: RolloutSource,
        checkpoints: Checkpoints,
        log: MetricsLog,
        view: LiveView,
        players: Baselines | None,
        stop: Callable[[], bool],
    ) -> None:
        self.parts = parts
        self.trainer = trainer
        self.attempts = attempts
        self.checkpoints = checkpoints
        self.log = log
        self.view = view
        self.players, self.stop = players, stop
        self.collector = Collector(parts.config, attempts, parts.tasks)
        self.monitor = CollapseMonitor()
        self.progress = Progress()
        self._recorded = 0
        """So many of the warnings are in the records of committed steps."""
        self.profiling = Profiling(
            parts.config.profile, parts.config.run_dir, parts.model, warn=self.warn, note=view.note
        )
        self.peak = device_peak(self.profiling.device, self.profiling.dtype)
        self._clock = time.perf_counter()

    async def run(self) -> None:
        """From where `progress` stands to the last step, or until `stop`."""
        section = self.parts.config.trainer
        await self.attempts.begin(self.progress.step)
        if not self.progress.before:
            self.trainer.begin()
            self.progress.before = self.progress.after = await self.evaluate("before", full=True)
        async with self.attempts.running():
            with self.profiling:
                while self.progress.step < section.steps and not self.stop():
                    with self.profiling.step(self.progress.step + 1):
                        try:
                            await self.step()
                        except StopAskedError:
                            break
        if self.checkpoints.steps()[-1:] != [self.progress.step]:
            self.save()
            self.checkpoints.prune()

    async def step(self) -> None:
        """One step, committed at its end."""
        parts, step, bound = self.parts, self.progress.step + 1, self.parts.config.rollout.staleness
        started = time.perf_counter()
        counters = parts.engine.stats()
        self.view.phase("sampling", f"step {step}")
        with phase("sampling"):
            collected = await self.collector.collect(step)
        sampled = time.perf_counter()
        async with self.attempts.training():
            with phase("prepare"):
                made = await self.attempts.compute(
                    lambda: self.trainer.prepare(
                        collected.kept, collected.baselines, version=step - 1, bound=bound
                    )
                )
            trained_ids = await self._reserve(step, collected, made)
            prepared = time.perf_counter()
            self.view.phase("training", f"step {step}")
            trained = made.metrics | (
                await self.attempts.compute(lambda: self.trainer.step(made.samples))
                if made.samples
                else {}
            )
            updated = time.perf_counter()
            with phase("publish"):
                await self.attempts.swap(step)

        now = time.perf_counter()
        timings = {
            "gen": sampled - started,
            "adv": prepared - sampled,
            "update_actor": updated - prepared,
            "update_weights": now - updated,
        }
        grown = {key: value - counters.get(key, 0.0) for key, value in parts.engine.stats().items()}
        told = {
            name: reason
            for name, reason in (collected.dropped | made.dropped).items()
            if reason != BASELINE
        }
        metrics = {
            "training/global_step": float(step),
            **collected.metrics,
            **self.attempts.stats(),
            **drop_metrics(told),
            **trained,
        }
        metrics |= performance_metrics(
            timings | {"step": now - started}, grown, trained, self.peak.flops_per_s
        )
        self.progress.step = step
        self.progress.generated_tokens += sum(
            t.num_completion_tokens() for t in collected.trajectories
        )
        self.progress.trained_tokens += int(trained.get("trainer/trained_tokens", 0))
        self.log.log(step, metrics)
        self.observe(step, metrics)
        checkpoint = await self._milestones(last=step == parts.config.trainer.steps)
        with phase("store"):
            await self._commit(
                step, self.plan(trained_ids, collected, trained), metrics, checkpoint
            )
        if checkpoint is not None:
            self.checkpoints.prune()
        await self.attempts.announce(step)
        self.view.step(step, parts.config.trainer.steps, metrics, Counter(told.values()))

    def observe(self, step: int, metrics: dict[str, float]) -> None:
        """Warns of what looks like a collapse."""
        for warning in self.monitor.observe(step, metrics):
            self.warn(f"step {warning.step}: {warning.message}")

    def plan(self, trained_ids: list[str], collected: Collected, trained: dict[str, float]) -> Plan:
        """What the step has trained on, so that it can be checked and done again."""
        by_id = {t.id: t for t in collected.kept}
        rollout = self.parts.config.rollout
        return Plan.make(
            [by_id[name] for name in trained_ids],
            earned={t.id: t.reward for t in collected.trajectories},
            baselines=collected.baselines,
            staleness=rollout.staleness,
            policy=rollout.policy,
            masked_tokens=int(trained.get("staleness/masked_tokens", 0)),
        )

    async def _reserve(self, step: int, collected: Collected, made: Made) -> list[str]:
        """The ledger knows what goes into the step, and why the rest does not. Ids of the former,
        in order."""
        store, dropped = self.parts.store, collected.dropped | made.dropped
        trained_ids = [t.id for t in collected.kept if t.id not in dropped]

        async def write() -> None:
            for reason in sorted(set(dropped.values())):
                await store.drop(
                    [t.id for t in collected.trajectories if dropped.get(t.id) == reason], reason
                )
            await store.reserve(trained_ids, step)

        with phase("store"):
            await with_retries(write, within_s=STORE_RETRY_S, what=f"reserving step {step}")
        return trained_ids

    async def _commit(
        self, step: int, plan: Plan, metrics: dict[str, float], checkpoint: dict[str, str] | None
    ) -> None:
        new = self.progress.warnings[self._recorded :]
        record = {
            "metrics": metrics,
            KEY: plan.to_record(),
            "collector": self.collector.state_dict(),
            "progress": msgspec.to_builtins(msgspec.structs.replace(self.progress, warnings=new)),
            "checkpoint": checkpoint,
        }
        await with_retries(
            lambda: self.parts.store.commit_step(step, record, ids=plan.ids),
            within_s=STORE_RETRY_S,
            what=f"committing step {step}",
        )
        self._recorded += len(new)

    async def evaluate(self, name: str, *, full: bool, label: str = "") -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds the sampled attempts.
        `label` tells two of one step apart."""
        self.view.phase("evaluating", name)
        started = time.perf_counter()
        samples = self.parts.config.evaluation.samples if full else 0
        with phase("evaluation"):
            metrics, tokens = await evaluate(
                self.parts, self.progress.step, samples=samples, players=self.players, label=label
            )
        self.progress.generated_tokens += tokens
        self.log.log(
            self.progress.step, metrics | {"timing_s/testing": time.perf_counter() - started}
        )
        self.view.evaluation(self.progress.step, metrics)
        return metrics

    def warn(self, text: str) -> None:
        self.progress.warnings.append(text)
        self.view.warn(text)

    def save(self, value: float | None = None) -> dict[str, str]:
        """A checkpoint of `progress.step`, for its record; older ones stay until that is committed.
        `value` is its evaluation, if any."""
        self.view.phase("saving", f"checkpoint of step {self.progress.step}")
        self.progress.wall_s += time.perf_counter() - self._clock
        self._clock = time.perf_counter()
        state: dict[str, Any] = {
            "progress": msgspec.to_builtins(self.progress),
            "monitor": self.monitor.state_dict(),
        }
        state["collector"] = self.collector.state_dict()
        with phase("checkpoint"):
            path, sha256 = self.checkpoints.save(
                self.progress.step,
                self.parts.model,
                self.parts.tokenizer,
                self.trainer.state_dict(),
                state,
                value,
                prune=False,
            )
        return {"path": str(path.relative_to(self.parts.config.run_dir)), "sha256": sha256}

    def restore(self, run_state: dict[str, Any]) -> None:
        """The inverse of what `save` wrote."""
        self.go_on_from(msgspec.convert(run_state["progress"], Progress))
        self.monitor.load_state_dict(run_state["monitor"])
        self.collector.load_state_dict(run_state["collector"])
        self._clock = time.perf_counter()

    def go_on_from(self, progress: Progress) -> None:
        """That much is committed, all its warnings included."""
        self.progress, self._recorded = progress, len(progress.warnings)

    def wall_s(self) -> float:
        return self.progress.wall_s + time.perf_counter() - self._clock

    async def _milestones(self, *, last: bool) -> dict[str, str] | None:
        """Evaluation and checkpoint of the step that has just been computed, when they are due;
        what is known of the latter."""
        config, step = self.parts.config, self.progress.step
        value = None
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            self.progress.after = await self.evaluate(
                "after" if last else f"step {step}", full=last
            )
            value = headline(self.progress.after)
        due = bool(config.checkpoint.every) and step % config.checkpoint.every == 0
        best = self.checkpoints.best_value
        better = (
            value is not None and bool(config.checkpoint.every) and (best is None or value > best)
        )
        return self.save(value) if last or due or better else None
