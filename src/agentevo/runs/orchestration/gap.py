"""Where fine-tuning ends if reinforcement learning follows (`sft.stop_at_gap`).

RL turns pass@k into pass@1: it raises the probability of what some of a group's attempts reach. So
the weights with the largest gap,

    gap = mean over tasks of  pass@k - pass@1

are kept, and not the last ones, whose entropy may be near 0. With n = k completed attempts, c of
them successful, the estimates are pass@k = [c > 0] and pass@1 = c / n
(`runs/evaluation/estimates.py`). A task with a failed attempt has neither and is left out.

A measurement replaces the best one if its gap is larger by more than one standard error of the
difference, on the tasks that both have (`is_larger`). Among measurements that noise can't tell
apart, the earliest is therefore kept, which has the highest entropy. While no gap is above 0, there
is no best one: nothing is solved yet, or everything, and fine-tuning continues.

Tasks, attempts and the rule follow from the run's seed. The attempts are stored as evaluations
(label LABEL), so a resumed run reads those that exist. The tasks are never held-out ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from agentevo.config import RunConfig
from agentevo.config.named_agents import trained_agents
from agentevo.errors import ConfigError
from agentevo.observability import LiveView
from agentevo.rollout.task_source import TaskSource, permutation
from agentevo.rollout.tasks import environment_tasks
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runtime.seeds import derive_seed
from agentevo.runtime.signals import finishes_before_stop
from agentevo.training.phases import phase
from agentevo.types import Task, Trajectory

if TYPE_CHECKING:
    from agentevo.runs.orchestration.conversations import SFTData
    from agentevo.runs.orchestration.run_record import RunRecord

LABEL = "training-tasks"
"""The label of the attempts in ids and seeds."""
MEASUREMENTS = 8
"""The number of measurements after the first one, if no interval is set."""
_ROUNDING = 1e-9


def chooses_by_gap(config: RunConfig, command: str) -> bool:
    """Whether the best checkpoint of a run is that of the largest gap."""
    return command == "sft" and config.sft.stop_at_gap.tasks > 0


class GapMeasurement(NamedTuple):
    """What the attempts at the training tasks show."""

    pass_1: float
    pass_k: float
    by_task: dict[str, float]
    """Task -> its gap. Empty if every task has a failed attempt; the shares are then 0."""
    entropy: float
    """Mean negative log-prob of the sampled tokens, in nats: an estimate of the entropy."""

    @property
    def gap(self) -> float:
        return self.pass_k - self.pass_1

    @property
    def error(self) -> float:
        """The standard error of the gap."""
        return standard_error([*self.by_task.values()])


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; 0 for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def is_larger(later: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Whether a later measurement's gaps, by task, are larger than the best ones by more than one
    standard error of the mean difference. False without a common task."""
    differences = [gap - best[task] for task, gap in later.items() if task in best]
    if not differences:
        return False
    return fmean(differences) > standard_error(differences) + _ROUNDING


def measure_attempts(attempts: Sequence[Trajectory]) -> GapMeasurement:
    """The measurement of the same number of attempts at each task."""
    by_task: dict[str, list[Trajectory]] = {}
    for attempt in attempts:
        by_task.setdefault(attempt.task_id, []).append(attempt)

    whole = {
        task: [bool(attempt.success) for attempt in members]
        for task, members in by_task.items()
        if all(attempt.status == "completed" for attempt in members)
    }
    log_probs = [value for attempt in attempts for turn in attempt.turns for value in turn.logprobs]
    return GapMeasurement(
        pass_1=fmean(fmean(successes) for successes in whole.values()) if whole else 0.0,
        pass_k=fmean(any(successes) for successes in whole.values()) if whole else 0.0,
        by_task={task: any(won) - fmean(won) for task, won in whole.items()},
        entropy=-fmean(log_probs) if log_probs else 0.0,
    )


def choose_tasks(
    config: RunConfig, source: TaskSource, demonstrates: Callable[[Task], bool], num_shown: int
) -> list[Task]:
    """The training tasks to play, in an order that follows from the run's seed: those that nothing
    demonstrates first. `num_shown`: the largest number of an environment's tasks that are
    demonstrated. Raises ConfigError if there is none."""
    count = config.sft.stop_at_gap.tasks
    tasks = source.given_to_train()
    if tasks:
        seed = derive_seed(config.run.seed, "gap-tasks")
        tasks = [tasks[place] for place in permutation(len(tasks), seed)]
    elif config.environment is not None:
        kind = config.environment.type
        tasks = environment_tasks(kind, config.run.seed, "train", 0, count + num_shown)
    else:
        raise ConfigError(
            "sft.stop_at_gap.tasks: there are no training tasks to play: give an environment, or "
            "tasks.train and an agent that attempts them, or set it to 0"
        )

    return sorted(tasks, key=demonstrates)[:count]


class GapStop:
    """The measurements of one run. `num_steps`: of the run."""

    def __init__(
        self,
        parts: Components,
        data: SFTData,
        num_steps: int,
        record: RunRecord,
        view: LiveView,
        is_stopped: Callable[[], bool],
    ) -> None:
        section = parts.config.sft.stop_at_gap
        self._parts = parts
        self._record = record
        self._view = view
        self._is_stopped = is_stopped
        self._attempts = section.attempts
        self._num_steps = num_steps
        self._every = section.every or math.ceil(num_steps / MEASUREMENTS)
        num_ids = len(data.task_ids)
        self._tasks = choose_tasks(parts.config, parts.tasks, data.demonstrates, num_ids)
        num_shown = sum(map(data.demonstrates, self._tasks))
        view.note(
            f"fine-tuning keeps the weights with the largest gap between pass@{self._attempts} and "
            f"pass@1 on {len(self._tasks)} training tasks, {num_shown} of them demonstrated: "
            f"{len(self._tasks) * self._attempts} attempts before the first step and every "
            f"{self._every} steps"
        )

    def is_due(self, step: int) -> bool:
        """Whether to measure after this step."""
        return step % self._every == 0 or step == self._num_steps

    async def measure(self) -> float | None:
        """Measures the current weights, logs and shows it. Returns the gap if it is the largest so
        far, otherwise None. Raises StopAskedError if the user asks to stop."""
        record = self._record
        step = record.progress.step
        self._view.phase("evaluating", f"training tasks, step {step}")
        started = time.perf_counter()
        with phase("evaluation"):
            attempts = await self._play(step)

        config = self._parts.config
        record.progress.generated_tokens += sum(t.num_completion_tokens() for t in attempts)
        if config.agents:  # the numbers are those of the main agent
            attempts = [t for t in attempts if t.agent == trained_agents(config)[0]]

        measured = measure_attempts(attempts)
        metrics = {"timing_s/testing": time.perf_counter() - started}
        if not measured.by_task:
            record.log.log(step, metrics)
            record.warn(f"step {step}: no gap, because an attempt at every training task failed")
            return None

        record.log.log(
            step,
            metrics
            | {
                "sft/tasks/pass@1": measured.pass_1,
                f"sft/tasks/pass@{self._attempts}": measured.pass_k,
                "sft/tasks/gap": measured.gap,
                "sft/tasks/gap_error": measured.error,
                "sft/tasks/entropy": measured.entropy,
                "sft/tasks/n": float(len(measured.by_task)),
            },
        )
        is_best = record.progress.rate_gap(measured.by_task)
        self._view.note(
            f"training tasks at step {step}: pass@1 {measured.pass_1:.1%}, "
            f"pass@{self._attempts} {measured.pass_k:.1%}, gap {100 * measured.gap:.1f} points "
            f"(standard error {100 * measured.error:.1f}), entropy {measured.entropy:.3f} nats"
            + (", the largest gap so far" if is_best else "")
        )
        return measured.gap if is_best else None

    async def _play(self, step: int) -> list[Trajectory]:
        work = asyncio.create_task(
            self._parts.sampler.sample(
                self._tasks,
                attempts=self._attempts,
                temperature=self._parts.config.sampling.temperature,
                split="eval",
                step=step,
                label=LABEL,
            )
        )
        if not await finishes_before_stop(work, self._is_stopped):
            raise StopAskedError("stopped while evaluating")
        return work.result()
