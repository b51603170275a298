"""Teachers score the sampled tokens of finished attempts (section `distillation`).

A teacher reads the ids of each root-to-leaf path of an attempt, in one request, and returns the
log-prob of each id. The turns keep those of the completions, so training and replay ask nobody
again. A teacher that fails or is late fails the attempt with the reason; the attempt never counts
as one without a teacher. If its server gives no answer to any attempt of a group, the group is not
stored and the run ends (`TeacherUnavailableError`): a resumed run samples the group again.

A request has token ids alone, and the ids of all images are the same. So an attempt with images
fails: a teacher that reads their ids without the images would score another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from agentevo.config.distillation import OTHER_SOURCES, DistillationSection
from agentevo.config.field_words import suggest_nearest
from agentevo.errors import (
    AgentEvoError,
    BadRequestError,
    ConfigError,
    describe_error,
    shown,
)
from agentevo.inference.remote_models.ledger import BudgetExceededError, RemoteModelError
from agentevo.rollout.failures import TEACHER_PREFIX, ShowFailure
from agentevo.runtime.event_loop import gather_all
from agentevo.runtime.tracebacks import traceback_of
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Task, Trajectory, path_of
from agentevo.types.images import images_of_task

ROLE = "teacher"
"""The role of these requests in the price log."""


ONLY_IDS = (
    "a teacher is sent token ids, which do not say which images: leave images out, or train "
    "without distillation"
)
NO_SERVICE = (401, 403, 404)
"""The statuses of a server that does not serve the teacher, besides 500 and more."""


class TeacherUnavailableError(AgentEvoError):
    """A teacher's server gives no answers."""


class TeacherModel(Protocol):
    """A model that scores given tokens (remote_models/model.py)."""

    async def score(
        self, context_ids: Sequence[int], ids: Sequence[int], *, role: str, attempt: str
    ) -> list[float]: ...


def teacher_of(task: Task, section: DistillationSection) -> str | None:
    """The name of the task's teacher; None if it has none."""
    return section.teacher_of(task.metadata.get("data_source"), task.environment)


def check_teachers(tasks: Sequence[Task], section: DistillationSection) -> None:
    """Raises ConfigError for a task to train on that has no teacher or shows images, and for a
    source that none of these tasks has."""
    if not tasks or not section.enabled:
        return

    for task in tasks:
        if images_of_task(task):
            raise ConfigError(
                f"distillation.teachers: the task {task.id!r} has images, and {ONLY_IDS}"
            )
        if teacher_of(task, section) is None:
            source = task.metadata.get("data_source") or task.environment
            remedy = f"add {source}: NAME" if source else "give its row a data_source"
            raise ConfigError(
                f"distillation.teachers: the task {task.id!r} "
                f"{f'of the source {source!r}' if source else 'without a data_source'} has no "
                f"teacher: {remedy}, or {OTHER_SOURCES}: NAME for all other sources"
            )

    sources = {
        source
        for task in tasks
        for source in (task.metadata.get("data_source"), task.environment)
        if isinstance(source, str)
    }
    unknown = [name for name in section.teachers if name not in {*sources, OTHER_SOURCES}]
    if unknown:
        raise ConfigError(
            f"distillation.teachers.{unknown[0]}: no task to train on has this source: "
            f"{suggest_nearest(unknown[0], sorted(sources))}remove it, or write it like a "
            f"data_source of the tasks ({shown(', '.join(sorted(sources)))})"
        )


class Teachers:
    """The teachers of a run; see the module."""

    def __init__(
        self,
        section: DistillationSection,
        models: Mapping[str, TeacherModel],
        show: ShowFailure = lambda name, error, trace: None,
    ) -> None:
        """`models`: the run's remote models. `show` is called for each attempt that could not be
        scored."""
        self._section = section
        self._models = models
        self._show = show

    async def score(
        self, trajectories: Sequence[Trajectory], calls: Mapping[str, AttemptCalls], task: Task
    ) -> list[Trajectory]:
        """The attempts at a task, in order, with the teacher's log-probs in their turns. Attempts
        that are not completed stay unchanged. Raises TeacherUnavailableError if none of these
        attempts got an answer."""
        asked = [t for t in trajectories if t.status == "completed" and t.turns]
        name = teacher_of(task, self._section)
        if name is None:
            reason = f"{TEACHER_PREFIX} failed: its source has none"
            scored = {t.id: self._fail(t, reason, None) for t in asked}
            return [scored.get(t.id, t) for t in trajectories]

        answers = await gather_all([self._ask(trajectory, calls, name) for trajectory in asked])
        unanswered = [answer for answer in answers if _is_unanswered(answer)]
        if unanswered and len(unanswered) == len(answers):
            raise TeacherUnavailableError(
                f"{TEACHER_PREFIX} {name!r} does not answer: {unanswered[0]}: start its server, or "
                f"correct remote_models.{name}, and resume the run"
            )

        scored = {}
        for trajectory, answer in zip(asked, answers, strict=True):
            if isinstance(answer, AgentEvoError):
                reason = f"{TEACHER_PREFIX} {name!r} failed: {describe_error(answer)}"
                scored[trajectory.id] = self._fail(trajectory, reason, answer)
            else:
                scored[trajectory.id] = answer

        return [scored.get(t.id, t) for t in trajectories]

    async def _ask(
        self, trajectory: Trajectory, calls: Mapping[str, AttemptCalls], name: str
    ) -> Trajectory | AgentEvoError:
        """The scored attempt, or why it has no scores."""
        try:
            if trajectory.id not in calls:
                return await self._score_with(trajectory, self._models[name])
            with calls[trajectory.id].call("scorer", f"{ROLE} {name}"):
                return await self._score_with(trajectory, self._models[name])
        except AgentEvoError as error:
            return error

    async def _score_with(self, trajectory: Trajectory, model: TeacherModel) -> Trajectory:
        turns = trajectory.turns
        if any(turn.images for turn in turns):
            raise BadRequestError(f"the attempt has images, and {ONLY_IDS}")

        parents = {turn.parent for turn in turns}
        leaves = [turn.index for turn in turns if turn.index not in parents]
        columns: dict[int, list[float]] = {}
        for leaf in leaves:
            columns |= await self._path_logprobs(trajectory, leaf, model)

        scored = [replace(turn, teacher_logprobs=columns[turn.index]) for turn in turns]
        return replace(trajectory, turns=scored)

    async def _path_logprobs(
        self, trajectory: Trajectory, leaf: int, model: TeacherModel
    ) -> dict[int, list[float]]:
        """Turn -> log-probs of its completion, for the turns from the root to a leaf."""
        path = path_of(trajectory.turns, leaf)
        if not any(len(turn.completion_ids) for turn in path):
            return {turn.index: [] for turn in path}

        ids = trajectory.context_ids(leaf) + list(trajectory.turns[leaf].completion_ids)
        first = len(path[0].prompt_ids)
        logprobs = await model.score(ids[:first], ids[first:], role=ROLE, attempt=trajectory.id)

        columns: dict[int, list[float]] = {}
        start = 0
        for turn in path:
            start += len(turn.prompt_ids) if turn is not path[0] else 0
            end = start + len(turn.completion_ids)
            columns[turn.index] = logprobs[start:end]
            start = end

        return columns

    def _fail(self, trajectory: Trajectory, error: str, raised: BaseException | None) -> Trajectory:
        self._show(trajectory.id, error, traceback_of(raised))
        return replace(
            trajectory, status="failed", error=error, reward=0.0, reward_parts={}, success=False
        )


def _is_unanswered(answer: Trajectory | AgentEvoError) -> bool:
    """Whether it is the failure of a server that can't be reached or serves nothing."""
    return (
        isinstance(answer, RemoteModelError)
        and not isinstance(answer, BudgetExceededError)
        and (not answer.status or answer.status in NO_SERVICE or answer.status >= 500)
    )
