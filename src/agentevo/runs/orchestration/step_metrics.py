"""Metrics of a step: of its trajectories, under verl's names, and of its time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import psutil

from agentevo.rollout.failures import count_kinds
from agentevo.training.learner import PreparedBatch
from agentevo.training.workload import speed_metrics
from agentevo.types import Trajectory
from agentevo.types.equality import are_equal

if TYPE_CHECKING:
    from agentevo.models.compute.device_peak import Peak
    from agentevo.runs.orchestration.batch_sources import BatchSource
    from agentevo.runs.orchestration.collect import Collected
    from agentevo.runs.orchestration.components import Components
    from agentevo.runs.orchestration.rollout_sources import RolloutSource


def _spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return (
        {
            f"{prefix}/mean": fmean(values),
            f"{prefix}/max": max(values),
            f"{prefix}/min": min(values),
        }
        if values
        else {}
    )


def rollout_metrics(
    trajectories: Sequence[Trajectory], dropped: Mapping[str, str]
) -> dict[str, float]:
    """Metrics of all sampled trajectories of a step; rewards and lengths over the completed
    ones."""
    done = [t for t in trajectories if t.status == "completed"]
    turns = [turn for t in done for turn in t.turns]
    metrics = {"rollout/in": float(len(trajectories))} | drop_metrics(dropped)
    kinds = count_kinds(t.error for t in trajectories if t.status == "failed")
    metrics |= {f"rollout/failed/{kind}": float(count) for kind, count in kinds.items()}
    metrics |= _spread("critic/score", [t.reward for t in done])
    metrics |= _spread("response_length", [float(len(turn.completion_ids)) for turn in turns])
    metrics |= _spread(
        "prompt_length", [float(len(t.turns[0].prompt_ids)) for t in done if t.turns]
    )
    metrics |= _spread("num_turns", [float(len(t.turns)) for t in done])
    if turns:
        metrics["response_length/clip_ratio"] = fmean(
            turn.finish_reason == "length" for turn in turns
        )

    if done:
        metrics["train/success"] = fmean(t.success for t in done)
        for key in sorted({key for t in done for key in t.metrics}):
            missing = 1.0 if key == "merge_rate" else 0.0
            metrics[f"agent/{key}"] = fmean(t.metrics.get(key, missing) for t in done)

        for name in sorted({name for t in done for name in t.timings}):
            times = [t.timings[name] for t in done if name in t.timings]
            metrics[f"perf/{name}"] = max(times) if name.endswith("/max") else fmean(times)

        for name in sorted({name for t in done for name in t.reward_parts}):
            metrics[f"reward_parts/{name}/mean"] = fmean(
                t.reward_parts.get(name, 0.0) for t in done
            )

        metrics |= _by_scorer(done)

    groups: dict[str, list[float]] = {}
    for t in done:
        groups.setdefault(t.group_id, []).append(t.reward)

    spreads = [pstdev(rewards) for rewards in groups.values()]
    if spreads:
        metrics |= {
            "group/num": float(len(spreads)),
            "group/reward_std/mean": fmean(spreads),
            "group/zero_std_ratio": fmean(map(are_equal, groups.values())),
        }

    return metrics


def _by_scorer(done: Sequence[Trajectory]) -> dict[str, float]:
    """For a batch whose attempts are not all judged by the same rewards: for each reward the mean
    of its values, and the share of successes, over the attempts that it judged."""
    judged: dict[str, list[Trajectory]] = {}
    for t in done:
        for name in {part.partition("/")[0] for part in t.reward_parts}:
            judged.setdefault(name, []).append(t)

    metrics: dict[str, float] = {}
    for name, attempts in sorted(judged.items()):
        if len(attempts) == len(done):
            continue

        scores = [
            sum(value for part, value in t.reward_parts.items() if part.partition("/")[0] == name)
            for t in attempts
        ]
        metrics[f"reward_by_scorer/{name}/mean"] = fmean(scores)
        metrics[f"reward_by_scorer/{name}/success"] = fmean(t.success for t in attempts)

    return metrics


def metrics_by_source(
    trajectories: Sequence[Trajectory], source_of: Callable[[str], str | None]
) -> dict[str, float]:
    """For a mixture's completed attempts: reward and success by the source of their task."""
    by_source: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        name = source_of(t.task_id)
        if t.status == "completed" and name is not None:
            by_source.setdefault(name, []).append(t)

    metrics: dict[str, float] = {}
    for name, attempts in sorted(by_source.items()):
        metrics[f"reward_by_source/{name}/mean"] = fmean(t.reward for t in attempts)
        metrics[f"reward_by_source/{name}/success"] = fmean(t.success for t in attempts)

    return metrics


def metrics_by_agent(
    trajectories: Sequence[Trajectory], dropped: Mapping[str, str], agents: Sequence[str]
) -> dict[str, float]:
    """`rollout_metrics` of the first agent, and those of each agent under `agents/NAME/`: a mean
    over the rewards of several agents has no meaning."""
    metrics: dict[str, float] = {}
    for number, agent in enumerate(agents):
        attempts = [t for t in trajectories if t.agent == agent]
        reasons = {t.id: dropped[t.id] for t in attempts if t.id in dropped}
        of_agent = rollout_metrics(attempts, reasons)
        metrics |= {} if number else of_agent
        metrics |= {f"agents/{agent}/{name}": value for name, value in of_agent.items()}

    return metrics


def drop_metrics(dropped: Mapping[str, str]) -> dict[str, float]:
    """How many trajectories are not trained on, and why. dropped: id -> reason."""
    metrics = {"rollout/dropped": float(len(dropped))}
    return metrics | {
        f"rollout/dropped/{reason}": float(count)
        for reason, count in Counter(dropped.values()).items()
    }


def collection_metrics(
    *, group_sizes: Sequence[int], length_parts: Sequence[float], baseline_rewards: Sequence[float]
) -> dict[str, float]:
    """Metrics of the trainable attempts: group sizes, the change of each kept reward by its length,
    and rewards of greedy attempts."""
    metrics = {"group/of_one": float(sum(size == 1 for size in group_sizes))}
    if length_parts:
        metrics["reward_parts/length/mean"] = fmean(length_parts)
    if baseline_rewards:
        metrics["rollout/baseline_reward"] = fmean(baseline_rewards)
    return metrics


def performance_metrics(
    timings: Mapping[str, float],
    engine: Mapping[str, float] | None,
    trained: Mapping[str, float],
    peak_flops_per_s: float,
) -> dict[str, float]:
    """Seconds per phase, tokens per second, and MFU. `engine` holds the growth of its counters in
    this step; None: the step sampled nothing."""
    step_s = timings["step"]
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in timings.items()}
    metrics |= speed_metrics(trained, timings.get("update_actor", 0.0), peak_flops_per_s)
    if engine is None:
        return metrics

    generated = engine.get("engine/generated_tokens", 0.0)
    logical = trained.get("trainer/logical_tokens", 0.0)
    if generated:  # otherwise engines of other processes sample and count
        metrics |= {
            "engine/generated_tokens": generated,
            "engine/tokens_per_s": generated / timings["gen"] if timings["gen"] else 0.0,
            "engine/prefix_hit_tokens": engine.get("engine/prefix_hit_tokens", 0.0),
            "engine/session_hit_tokens": engine.get("engine/session_hit_tokens", 0.0),
        }

    metrics |= {
        "perf/total_num_tokens": logical,
        "perf/time_per_step": step_s,
        "perf/throughput": (generated + logical) / step_s,
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    return metrics


class StepMeter:
    """Measures steps while they run: the seconds of their phases, and the growth of the engine's
    counters. From them and a step's data it computes the step's row of metrics. The time of a
    version's announcement is in the row of the next step, because the row of the version's own step
    is committed before the announcement."""

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
        metrics = {
            "training/global_step": float(step),
            **collected.metrics,
            **batch.metrics,
            **updated,
        }
        engine = None
        if self._source.samples_rollouts:
            metrics |= self._rollouts.stats() | drop_metrics(dropped)
            engine = {
                key: value - self._counters.get(key, 0.0)
                for key, value in self._parts.engine_stats().items()
            }

        return metrics | performance_metrics(timings, engine, metrics, self._peak.flops_per_s)

    async def announce(self, step: int) -> None:
        """Announces version `step` to other processes, and measures the time."""
        started = time.perf_counter()
        await self._rollouts.announce(step)
        self._announced_s = time.perf_counter() - started
