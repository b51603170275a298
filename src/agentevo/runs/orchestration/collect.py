"""The trajectories that a step trains on: attempts -> leave out the unusable -> filters, on the
rewards as earned -> length shaping.

With dynamic sampling the first two are repeated on further tasks while the step lacks groups with
different rewards. Tasks and seeds of every round follow from the step, so a resumed run collects
the same trajectories. In groups that all failed, successes of earlier steps may take the place of
failures before the filters (success_replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Protocol

from agentevo.algorithms.filters import RLPRStd
from agentevo.config import AlgorithmSection, RunConfig
from agentevo.config.named_agents import by_rank, trained_agents
from agentevo.rollout.curriculum import SOLVED
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.orchestration.rollout_sources import RolloutSource
from agentevo.runs.orchestration.step_metrics import (
    collection_metrics,
    metrics_by_agent,
    metrics_by_source,
    rollout_metrics,
)
from agentevo.runs.orchestration.success_replay import REPLACED, SuccessReplay
from agentevo.store.store import Store
from agentevo.training.batching.selection import rewards_by_group, select, usable
from agentevo.training.batching.shaping import shape_by_length
from agentevo.training.batching.staleness import age_of_oldest
from agentevo.types import Task, Trajectory
from agentevo.types.images import ImageFile

NOT_TRAINED = "not-trained"
"""Drop reason of the attempts of an agent that is not trained."""
ONLY_SAMPLED = "only-sampled"
"""Drop reason of every attempt of a run that trains on no attempt (trainer.epochs=0)."""
STALE = "stale"
"""Drop reason of an attempt that has a token older than rollout.staleness allows."""


@dataclass(frozen=True)
class Collected:
    """The attempts that a step has sampled, and the part that it trains on."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """Everything that was sampled and is in the store, including greedy attempts, with rewards as
    they were earned."""
    trainable: list[Trajectory] = field(default_factory=list)
    """The trajectories to train on, in order, with their final rewards."""
    replayed: list[Trajectory] = field(default_factory=list)
    """Those of them that are successes of earlier steps, with rewards as they were earned. They are
    the last of `trainable`, each in the group that it joins."""
    data_items: Sequence[Any] = ()
    """Samples or pairs that come from data instead of this run's attempts."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Trajectory id -> why it is not trained on."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Task id -> final reward of the greedy attempt; empty unless the advantage needs it."""
    metrics: dict[str, float] = field(default_factory=dict)
    images: dict[str, ImageFile] = field(default_factory=dict)
    """The files of the images in the prompts of `trainable`, by digest."""


@dataclass
class _Gathered:
    """The attempts of a step so far, round by round."""

    sampled: list[Trajectory] = field(default_factory=list)
    greedy: list[Trajectory] = field(default_factory=list)
    replayed: list[Trajectory] = field(default_factory=list)
    """Successes of earlier steps, in the groups that they join."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Trajectory id -> drop reason, for the drops that are decided at the end of a round."""
    metrics: dict[str, float] = field(default_factory=dict)


class StepTasks(Protocol):
    """Which tasks a step has (rollout/task_source.py). By default nothing but a step's own tasks
    exists."""

    def train(self, step: int) -> Sequence[Task]: ...

    def refill(self, step: int) -> Iterator[Task]:
        """More tasks for a step that could not fill its batch."""
        return iter(())

    def given_id(self, task_id: str) -> str:
        """The id of the given task that a played task repeats."""
        return task_id

    def source_of(self, task_id: str) -> str | None:
        """The name of a task's source, where sources are mixed."""
        return None

    async def learn(self, store: Store) -> None:
        """Reads the part of the committed steps that determines the tasks of later steps."""

    def stage_name(self, step: int) -> str:
        """The name of the stage of a step; empty if there are none."""
        return ""

    def metrics_of(self, step: int) -> dict[str, float]:
        """Metrics of how a step's tasks were chosen."""
        return {}


class Collector:
    """Collects the trajectories of one step after another. `state_dict` holds the state that it
    keeps between steps."""

    def __init__(
        self,
        config: RunConfig,
        attempts: RolloutSource,
        tasks: StepTasks,
        successes: SuccessReplay | None = None,
    ) -> None:
        """`successes`: replays earlier successes; None if the recipe does not ask for it."""
        self._config = config
        self._successes = successes
        self._attempts = attempts
        self._tasks = tasks
        self._needs_baseline = "baseline_rewards" in config.algorithm.needs
        self._rlpr = _rlpr_filter(config.algorithm)
        self._solved: dict[str, list[int]] = {}

    async def collect(self, step: int) -> Collected:
        """Samples for step `step` (from 1) with the engine's present weights, in as many rounds as
        it needs and is allowed."""
        algorithm = self._config.algorithm
        tasks = self._tasks.train(step)
        if self._successes is not None:
            await self._successes.begin_step(step)

        refill = self._tasks.refill(step)
        target_groups = len(tasks) if algorithm.dynamic_sampling > 1 else None
        gathered = _Gathered()
        rounds = 0
        while tasks:
            last = await self._round(step, tasks, gathered)
            rounds += 1
            if last:  # these groups are already a selection
                algorithm = algorithm.model_copy(update={"keep_groups": 1.0})

            selected, dropped = select(
                [*gathered.sampled, *gathered.replayed],
                algorithm,
                before=gathered.dropped,
                num_groups=target_groups,
                needs_others=not self._config.distillation.enabled,
            )
            informative = len({t.group_id for t in selected})
            num_groups = len({t.group_id for t in gathered.sampled})
            tasks = []
            if target_groups is not None and rounds < algorithm.dynamic_sampling and not last:
                tasks = list(islice(refill, next_round(target_groups, informative, num_groups)))

        if self._rlpr is not None:
            self._rlpr.end_step()

        collected = self._collect_result(
            step, gathered, selected, dropped, rounds if target_groups is not None else None
        )
        collected.metrics.update(self._tasks.metrics_of(step))
        self._solved = solved_attempts(gathered.sampled) if self._config.tasks.curriculum else {}
        return collected

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON values. It contains what the newest step
        solved, for the step's record, which a curriculum reads."""
        rlpr = {"rlpr": self._rlpr.state_dict()} if self._rlpr is not None else {}
        return rlpr | ({SOLVED: self._solved} if self._solved else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. A filter that was off until now starts without history."""
        if self._rlpr is not None and "rlpr" in state:
            self._rlpr.load_state_dict(state["rlpr"])

    async def _round(self, step: int, tasks: Sequence[Task], gathered: _Gathered) -> bool:
        """Samples a group per task and makes the decisions that are made once per round. Returns
        whether this was the last round."""
        rollout_round = await self._attempts.round(step, tasks)
        trajectories = rollout_round.trajectories
        sampled = [t for t in trajectories if not is_baseline(t)]
        greedy = [t for t in trajectories if is_baseline(t)]

        gathered.dropped |= rollout_round.dropped
        gathered.metrics |= rollout_round.metrics
        gathered.dropped |= {t.id: STALE for t in sampled if self._too_old(t, step)}
        if self._config.agents:
            learning = trained_agents(self._config)
            gathered.dropped |= {t.id: NOT_TRAINED for t in sampled if t.agent not in learning}

        candidates, _ = usable(
            [t for t in sampled if t.id not in gathered.dropped], self._config.algorithm
        )
        if self._needs_baseline:
            measured = {t.task_id for t in greedy if t.status == "completed"}
            gathered.dropped |= {
                t.id: "no-baseline" for t in candidates if t.task_id not in measured
            }
            candidates = [t for t in candidates if t.task_id in measured]

        if self._rlpr is not None:
            kept = self._rlpr.filter(
                [t.reward for t in candidates], [t.group_id for t in candidates]
            )
            below = sorted(set(range(len(candidates))) - set(kept))
            gathered.dropped |= {candidates[place].id: "below-usual-spread" for place in below}

        if self._successes is not None:
            replayed, replaced = await self._successes.replay(candidates, step)
            gathered.replayed += replayed
            gathered.dropped |= dict.fromkeys(replaced, REPLACED)

        gathered.sampled += sampled
        gathered.greedy += greedy
        return rollout_round.last

    def _too_old(self, trajectory: Trajectory, step: int) -> bool:
        """Whether the whole trajectory is left out: its oldest token breaks the staleness bound,
        and `rollout.policy` does not mask single tokens."""
        rollout = self._config.rollout
        if rollout.policy in ("mask", "correct") or trajectory.status != "completed":
            return False
        versions = [version for turn in trajectory.turns for version in turn.versions]
        return bool(versions) and step - 1 - min(versions) > rollout.staleness

    def _collect_result(
        self,
        step: int,
        gathered: _Gathered,
        selected: list[Trajectory],
        dropped: dict[str, str],
        rounds: int | None,
    ) -> Collected:
        algorithm = self._config.algorithm
        length_max = self._config.length_max
        shaped = shape_by_length(selected, algorithm, length_max)
        measured = [t for t in gathered.greedy if t.status == "completed"]
        baselines = {t.task_id: t.reward for t in shape_by_length(measured, algorithm, length_max)}
        of_earlier_steps = {t.id for t in gathered.replayed}
        dropped = {name: why for name, why in dropped.items() if name not in of_earlier_steps}
        replayed = [t for t in selected if t.id in of_earlier_steps]
        trainable, _ = usable(gathered.sampled, algorithm)
        agents = by_rank(self._config)
        metrics = (
            metrics_by_agent(gathered.sampled, dropped, agents)
            if agents
            else rollout_metrics(gathered.sampled, dropped)
        )
        metrics |= gathered.metrics
        metrics |= metrics_by_source(gathered.sampled, self._tasks.source_of)
        metrics |= collection_metrics(
            group_sizes=[len(rewards) for rewards in rewards_by_group(trainable).values()],
            length_parts=[
                after.reward - before.reward for before, after in zip(selected, shaped, strict=True)
            ]
            if algorithm.length_shaping != "none"
            else [],
            baseline_rewards=[t.reward for t in measured],
        )
        if self._successes is not None:
            ages = [age_of_oldest(t, trainer_version=step - 1) for t in replayed]
            metrics["rollout/replayed"] = float(len(replayed))
            metrics |= {"rollout/replay_age": fmean(ages)} if ages else {}

        if rounds is not None:
            surplus = {t.group_id for t in gathered.sampled if dropped.get(t.id) == "surplus"}
            informative = len(surplus | {t.group_id for t in selected})
            metrics["rollout/rounds"] = float(rounds)
            metrics["rollout/informative_share"] = informative / max(
                len({t.group_id for t in gathered.sampled}), 1
            )

        return Collected(
            trajectories=[*gathered.sampled, *gathered.greedy],
            trainable=shaped,
            replayed=replayed,
            dropped=dropped | {t.id: BASELINE for t in gathered.greedy},
            baselines=baselines,
            metrics=metrics,
        )


def solved_attempts(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Task id -> how many of its completed attempts have succeeded, and how many there are."""
    counts_by_task: dict[str, list[int]] = {}
    for trajectory in trajectories:
        if trajectory.status == "completed":
            counts = counts_by_task.setdefault(trajectory.task_id, [0, 0])
            counts[0] += trajectory.success
            counts[1] += 1
    return counts_by_task


def is_baseline(trajectory: Trajectory) -> bool:
    """Whether the trajectory is the greedy attempt of a group's task."""
    return trajectory.group_id.startswith(f"{trajectory.task_id}/{BASELINE}@")


def next_round(target: int, informative: int, sampled: int) -> int:
    """The number of groups to sample next: as many as are expected to give the missing groups, by
    the share that was informative so far.

    At most `target`, and as many if nothing was informative; 0 when the batch is full.
    """
    missing = target - informative
    if missing <= 0:
        return 0
    return min(target, math.ceil(missing * sampled / informative)) if informative else target


def _rlpr_filter(section: AlgorithmSection) -> RLPRStd | None:
    if section.rlpr_beta is None:
        return None

    settings: dict[str, Any] = {
        "decay": section.rlpr_decay,
        "record_from": section.rlpr_record_from,
        "start": section.rlpr_start,
    }
    return RLPRStd(
        beta=section.rlpr_beta,
        **{name: value for name, value in settings.items() if value is not None},
    )
