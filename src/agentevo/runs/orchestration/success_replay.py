"""Replays earlier successes in groups whose attempts have all failed, so that the group has
advantages (`algorithm.replay_successes`; ARPO, arXiv 2505.16282, and `apply_replay` in
`verl/trainer/ray_trainer.py` of its code).

    buffer of a task at step s = its newest replay_per_task successes on which the steps
                                 s - replay_max_age to s - 1 have trained
    in a group of n failures: min(replay_successes, n - 1) successes, drawn from the buffer without
    repetition, take the place of the failures with the lowest rewards, the first of several

A replayed attempt keeps its tokens, log-probs and versions, so its ratio is to the policy that
sampled it. (ARPO's code recomputes them with the present policy, which hides the difference.) None
of its tokens is older than replay_max_age versions. It counts in no success rate of the step.

There is no state: the buffer follows from the committed steps, and the draws from the run's seed,
the step and the group. So a resumed run replays the same attempts. The step's plan names them, and
the store keeps them as attempts of the step that first trained on them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from agentevo.config import RunConfig
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.runtime.seeds import derive_seed
from agentevo.store.store import Store
from agentevo.training.batching.selection import usable
from agentevo.training.batching.staleness import age_of_oldest
from agentevo.training.batching.step_plan import StepPlan
from agentevo.types import Trajectory

REPLACED = "replaced"
"""Drop reason of a failed attempt whose place an earlier success has taken."""


class TrainedSuccess(NamedTuple):
    step: int
    """The step that trained on it."""
    trajectory_id: str


class SuccessReplay:
    """The successes of a run's tasks, from the store."""

    def __init__(self, config: RunConfig, store: Store, given_id: Callable[[str], str]) -> None:
        """`given_id`: the id of a played task -> the id of the given task that it repeats."""
        algorithm = config.algorithm
        self._algorithm = algorithm
        self.max_age = algorithm.replay_max_age_versions
        self._per_group = algorithm.replay_successes
        self._seed = config.run.seed
        self._store = store
        self._given_id = given_id
        self._last_step = 0
        """The newest committed step that was read."""
        self._buffers: dict[str, deque[TrainedSuccess]] = defaultdict(
            lambda: deque(maxlen=algorithm.replay_buffer_size)
        )
        self._used: set[str] = set()
        """The ids that the present step replays: none is in it twice."""

    async def begin_step(self, step: int) -> None:
        """Reads the successes of the committed steps before `step` that are new enough."""
        self._used = set()
        for trained in range(max(self._last_step + 1, step - self.max_age), step):
            rows = await with_retries(
                lambda: self._store.summaries(trained_step=trained),  # noqa: B023 (called at once)
                within_s=STORE_RETRY_S,
                what="reading earlier successes",
            )
            for row in sorted(rows, key=lambda row: (row.group_id, row.attempt)):
                if row.success:
                    success = TrainedSuccess(trained, row.id)
                    self._buffers[self._given_id(row.task_id)].append(success)

        self._last_step = step - 1

    async def replay(
        self, attempts: Sequence[Trajectory], step: int
    ) -> tuple[list[Trajectory], list[str]]:
        """The successes to replay among the usable attempts of a round, each in the group that it
        joins, and the ids of the failures whose place they take."""
        groups: dict[str, list[Trajectory]] = {}
        for attempt in attempts:
            groups.setdefault(attempt.group_id, []).append(attempt)

        replayed: list[Trajectory] = []
        replaced: list[str] = []
        for group_id, members in groups.items():
            if any(member.success for member in members):
                continue
            count = min(self._per_group, len(members) - 1)
            successes = await self._draw(members[0].task_id, group_id, step, count)
            replayed += [replace(success, group_id=group_id) for success in successes]
            weakest = sorted(members, key=lambda member: member.reward)
            replaced += [member.id for member in weakest[: len(successes)]]

        return replayed, replaced

    async def _draw(self, task_id: str, group_id: str, step: int, count: int) -> list[Trajectory]:
        """At most `count` successes at the task, none with a token that is too old. A resumed run
        may leave out attempts that an earlier step has trained on (algorithm.drop_truncated)."""
        buffer = self._buffers.get(self._given_id(task_id), ())
        candidates = [
            success
            for success in buffer
            if success.step >= step - self.max_age and success.trajectory_id not in self._used
        ]
        seed = derive_seed(self._seed, "replay", step, group_id) % 2**32
        drawn: list[Trajectory] = []
        for place in np.random.RandomState(seed).permutation(len(candidates)):
            if len(drawn) == count:
                break
            success = await with_retries(
                lambda: self._read(candidates[place]),  # noqa: B023 (called at once)
                within_s=STORE_RETRY_S,
                what="reading an earlier success",
            )
            is_usable = bool(usable([success], self._algorithm)[0])
            if is_usable and age_of_oldest(success, trainer_version=step - 1) <= self.max_age:
                drawn.append(success)
                self._used.add(success.id)

        return drawn

    async def _read(self, success: TrainedSuccess) -> Trajectory:
        """Raises TrainingError if it is not what its step trained on."""
        (record,) = await self._store.steps(after=success.step - 1, limit=1)
        trajectory = await self._store.trajectory(success.trajectory_id)
        StepPlan.of(record.step, record.record).check_unchanged(trajectory)
        return trajectory
