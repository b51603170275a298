"""The sources of a step's batch: attempts of the policy itself, or given data.

    collect(step)             the attempts or data of this step
    prepare(collected, step)  their samples, as the trainer's `step` takes them
    replay(record)            the samples of a committed step, again

The loop (run.py) is the same for all sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentevo.config import RunConfig
from agentevo.errors import ConfigError, TrainingError
from agentevo.runs.orchestration.collect import ONLY_SAMPLED, Collected, Collector, StepTasks
from agentevo.runs.orchestration.rollout_sources import RolloutSource
from agentevo.runs.orchestration.success_replay import SuccessReplay
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import StepRecord
from agentevo.store.store import Store
from agentevo.training.batching.credit import CreditAsker, CreditedGroups
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.learner import PreparedBatch, RolloutTrainer
from agentevo.training.pairs import Pair, PairData
from agentevo.types import Trajectory
from agentevo.types.images import ImageFile, images_of_samples


class BatchSource(ABC):
    """See the module. `num_steps` is the number of steps of the run. By default there is no
    held-out data: held-out tasks measure the policy."""

    num_steps: int
    activity: str = "data"
    """The name of `collect` in the view and in profiles."""
    samples_rollouts: bool = False
    """Whether batches are made of attempts, so that the metrics of the engine and of the attempts
    describe a step."""

    @abstractmethod
    async def collect(self, step: int) -> Collected: ...

    @abstractmethod
    def prepare(self, collected: Collected, step: int) -> PreparedBatch: ...

    async def replay(self, record: StepRecord) -> PreparedBatch:
        """By default the same data: it follows from the seed and the step. Raises TrainingError if
        the store no longer has the step's training data."""
        return self.prepare(await self.collect(record.step), record.step)

    def evaluate(self, stop: Callable[[], bool]) -> dict[str, float]:
        """Metrics of the policy on held-out data; empty if there is none. Raises StopAskedError
        when `stop()` becomes true during the evaluation."""
        return {}

    def opening_metrics(self) -> dict[str, float]:
        """Metrics of the data that are logged before the first step."""
        return {}

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The value by which the best checkpoint is chosen (higher is better), from `evaluate`'s
        metrics; None if the metrics do not contain it."""
        return None

    def summary(self, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
        """Entries of summary.json that only this source has."""
        return {}

    def warnings(self) -> list[str]:
        return []

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RolloutBatches(BatchSource):
    """Groups of attempts at a step's tasks, made by the policy (reinforcement learning)."""

    activity = "sampling"
    samples_rollouts = True

    def __init__(
        self,
        config: RunConfig,
        rollouts: RolloutSource,
        tasks: StepTasks,
        trainer: RolloutTrainer,
        store: Store,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`note` is called for each stage of the tasks that begins."""
        self.num_steps = config.trainer.steps
        self._successes = (
            SuccessReplay(config, store, tasks.given_id)
            if config.algorithm.replay_successes
            else None
        )
        self.collector = Collector(config, rollouts, tasks, self._successes)
        self._only_samples = config.trainer.epochs == 0
        self._tasks = tasks
        self._note = note
        self._stage = ""
        self._staleness = config.rollout.staleness
        self._trainer = trainer
        self._store = store
        credit = config.algorithm.credit
        self._credit = None if credit is None else CreditAsker(credit)

    async def collect(self, step: int) -> Collected:
        """See Collector.collect. The committed steps determine its tasks."""
        await self._tasks.learn(self._store)
        stage = self._tasks.stage_name(step)
        if stage != self._stage:
            self._stage = stage
            self._note(f"step {step} is of the stage {stage}")
        collected = await self.collector.collect(step)
        return replace(collected, images=await self._files_of(collected.trainable))

    async def _files_of(self, trajectories: Sequence[Trajectory]) -> dict[str, ImageFile]:
        """Digest -> file of the images in the prompts. An image that the store does not have, or
        whose bytes were changed, is left out: the trainer drops its attempts and says why."""
        spans = (span for t in trajectories for turn in t.turns for span in turn.images)
        digests = list(dict.fromkeys(span.digest for span in spans))
        if not digests:
            return {}
        return await with_retries(
            lambda: self._store.images(digests),
            within_s=STORE_RETRY_S,
            what="reading the images of a step's attempts",
        )

    def prepare(self, collected: Collected, step: int) -> PreparedBatch:
        """Advantages, or pairs, of the attempts that were kept. No attempt is older than
        `rollout.staleness`, except replayed ones."""
        if self._only_samples:
            return PreparedBatch([], dropped={t.id: ONLY_SAMPLED for t in collected.trainable})

        credited = self._ask_credit(collected.trainable)
        if collected.images:
            self._trainer.show(collected.images)
        batch = self._trainer.prepare(
            [t for t in collected.trainable if t.id not in credited.dropped],
            collected.baselines,
            version=step - 1,
            bound=self._staleness,
            turn_credits=credited.of_turns,
            replayed={t.id for t in collected.replayed},
        )
        batch.dropped |= credited.dropped
        batch.warnings += credited.warnings
        return batch

    def _ask_credit(self, trajectories: Sequence[Trajectory]) -> CreditedGroups:
        return CreditedGroups() if self._credit is None else self._credit.ask(trajectories)

    async def replay(self, record: StepRecord) -> PreparedBatch:
        """Makes the samples from the step's plan and the attempts in the store."""
        plan = StepPlan.of(record.step, record.record)

        stored = await with_retries(
            lambda: plan.read_trained(self._store, record.step),
            within_s=STORE_RETRY_S,
            what=f"reading what step {record.step} trained on",
        )
        trained = plan.restore_trained(stored)
        credited = self._ask_credit(trained)
        if credited.dropped:
            problem = (
                f"step {record.step} can't be repeated: algorithm.credit fails now, and did not "
                f"when the step was committed"
            )
            raise TrainingError("\n".join([problem, *credited.warnings]))

        if images := await self._files_of(trained):
            self._trainer.show(images)
        return self._trainer.prepare(
            trained,
            plan.baselines,
            version=record.step - 1,
            bound=plan.staleness,
            turn_credits=credited.of_turns,
            replayed=plan.replayed,
        )

    def state_dict(self) -> dict[str, Any]:
        return self.collector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collector.load_state_dict(state)


class GivenPairs(BatchSource):
    """Pairs of answers from a file or from another run (preference training without sampling).

    The run's seed shuffles the groups of pairs again in each round. Groups that do not fill a step
    at a round's end wait for the next one: no step has a group twice.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Sequence[Sequence[Pair]],
        images: Mapping[str, ImageFile],
    ) -> None:
        """`images`: those of the answers, by digest."""
        self._images = images
        self.num_steps = config.trainer.steps
        self._data = PairData(groups, config.trainer.groups_per_step, config.run.seed)

    async def collect(self, step: int) -> Collected:
        """The step's pairs."""
        return Collected(data_items=self._data.of_step(step))

    def prepare(self, collected: Collected, step: int) -> PreparedBatch:
        """The pairs are trained on as they are."""
        pairs = collected.data_items
        samples = [sample for pair in pairs for sample in pair.samples]
        return PreparedBatch(
            pairs,
            {"preference/num_pairs": float(len(pairs))},
            images=images_of_samples(samples, self._images),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._data.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the pairs differ from those with which the run was started."""
        if state != self.state_dict():
            raise ConfigError(
                "data.pairs, data.pairs_from: the pairs differ from those that the run was "
                "started with: restore them, or start again with run.overwrite=true"
            )
