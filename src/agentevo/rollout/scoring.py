"""Scores a group's attempts after the group has ended. The scorers are the task's own, or else
`rewards` of the recipe. Without either, the agent's own reward counts.

    reward = sum of weight * score over the list; the list's first reward determines success

A single scorer of the task has the weight 1. Each of several (`math,format`) has the weight from
the recipe's list. A reward whose `requires` is not met has the score 0. If a scorer raises an
error, is late or returns no number, the attempt becomes a failed one with the reason. An attempt
without a score never counts as 0.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any

import pydantic
from msgspec.structs import replace

from agentevo.agents.environment_thread import EnvironmentThread, Pace
from agentevo.agents.tools.state_checks import STATE_CHECKS
from agentevo.environments.sandbox import Sandboxes
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import AgentEvoError, ConfigError, OverreachError, describe_error
from agentevo.rewards import RewardConfig, Score, make_reward
from agentevo.rewards.returned_values import plain_number
from agentevo.rewards.reward import (
    ScoredPolicy,
    ScorerModel,
    Unscored,
    call_function,
    call_group_scorer,
    call_scorer,
    reward_config,
    score_of,
)
from agentevo.rollout.failures import NO_REWARD, ShowFailure
from agentevo.rollout.group import InfrastructureFailure
from agentevo.runtime.event_loop import NoticesBlocks, TaskScope
from agentevo.runtime.signals import Interrupt
from agentevo.runtime.tracebacks import describe_function, traceback_of
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Task, Trajectory
from agentevo.types.copies import copy_of_task, copy_of_trajectory
from agentevo.types.images import ImageFile

Calls = Mapping[str, AttemptCalls]
"""Maps a trajectory's id to the record of its calls. Calls of trajectories that are not in the map
are not recorded."""

NO_POLICY = (
    "the reward {!r} failed: it needs the policy's engine, which this process does not have: use "
    "it in runs whose attempts `agentevo train` or `agentevo sample` makes"
)
OWN_REWARD = "own_reward"
"""The metric for the reward from the agent or the environment, on an attempt that a ranking reward
scores."""
EVALUATIONS = ("greedy", "sampled", "eval")
"""The endings of group labels that belong to evaluations."""
_GROUP = re.compile(r"/(?P<label>[^/@]+)@(?P<step>\d{1,9})(?::[^/@]*)?\Z")
REWARD = "a reward"
"""The name of an exception's origin in error messages."""
CANCEL_TIMEOUT_S = 5.0
"""The time that a late scorer has to end after it is cancelled, in seconds."""


def scorers_of(task: Task) -> list[str]:
    """The names of the task's own rewards. Empty if the recipe's rewards apply."""
    return [name.strip() for name in (task.scorer or "").split(",") if name.strip()]


def step_of(group_id: str) -> int | None:
    """The training step of a group, from its id (sampler.group_name). None for an evaluation's
    group."""
    named = _GROUP.search(group_id)
    if named is None or named["label"].endswith(EVALUATIONS):
        return None
    return int(named["step"])


class ScorerFailure(AgentEvoError):
    """A reward could not score an attempt. The reward's exception, if it raised one."""

    raised: BaseException | None = None


class NamedReward:
    """One reward of a list. It calls the registered function or class, within the reward's
    deadline."""

    def __init__(self, config: RewardConfig, models: Mapping[str, ScorerModel]) -> None:
        """Raises ConfigError if the reward can't be created."""
        self.config = config
        self._models = models
        self._item = make_reward(config)
        self._sandboxes = self._make_sandboxes()
        self._pace = Pace()
        self._notices = NoticesBlocks(
            f"the reward {config.title!r}",
            "await an async client, call what blocks by `await asyncio.to_thread(...)`, or write a "
            "function without `async`: each call then has a thread of its own",
        )

    def _make_sandboxes(self) -> Sandboxes | None:
        """The sandboxes for a scorer whose `score` has a parameter for them. The scorer's `sandbox`
        configures them."""
        score = getattr(self._item, "score", None)
        if score is None or "sandboxes" not in inspect.signature(score).parameters:
            return None

        options = getattr(self._item, "sandbox", {})
        try:
            return Sandboxes(SandboxSection(**options))
        except pydantic.ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(["sandbox", *map(str, wrong["loc"])])
            raise ConfigError(f"rewards: {self.config.title}.{key}: {wrong['msg']}") from error

    @property
    def judges_groups(self) -> bool:
        return hasattr(self._item, "score_group")

    @property
    def keeps_own_reward(self) -> bool:
        """Whether the agent's own reward is stored with the scores, as the metric OWN_REWARD."""
        return bool(getattr(self._item, "keeps_own_reward", False))

    @property
    def asks_models(self) -> bool:
        """Whether the scores depend on replies of remote models."""
        return self._has_parameter("models")

    @property
    def sees_images(self) -> bool:
        """Whether the scores depend on the images of the attempts."""
        return self._has_parameter("images") and getattr(self.config, "images", True) != 0

    def _has_parameter(self, name: str) -> bool:
        """Whether the reward's function or method has this parameter."""
        method = "score_group" if self.judges_groups else "score"
        function = getattr(self._item, method, self._item)
        return name in inspect.signature(function).parameters

    @property
    def asks_policy(self) -> bool:
        """Whether the scores depend on the policy's weights."""
        function = getattr(self._item, "score", None)
        return function is not None and "policy" in inspect.signature(function).parameters

    async def prepare(self, tasks: Sequence[Task], policy: ScoredPolicy) -> None:
        """Lets the reward use the policy before it scores, within `timeout_s` for each task. Raises
        ScorerFailure, and InfrastructureFailure if the policy can't be reached."""
        if not (self.asks_policy and hasattr(self._item, "prepare")):
            return

        limit_s = self.config.timeout_s * max(len(tasks), 1)
        prepared = await self._within_limit(lambda: self._item.prepare(tasks, policy), limit_s)
        if isinstance(prepared, ScorerFailure):
            raise prepared

    def check(self) -> None:
        """Raises ConfigError if the reward needs a remote model that the recipe does not have, or
        shows images to one that takes none."""
        for name in getattr(self._item, "models_asked", ()):
            if name not in self._models:
                raise ConfigError(
                    f"rewards: {self.config.title} asks the remote model {name!r}, and the "
                    f"recipe has no model of that name: add remote_models.{name} with its model "
                    f"and base_url "
                    "(docs/remote_models.md)"
                )
            if getattr(self.config, "images", 0) and not self._models[name].sees_images:
                raise ConfigError(
                    f"rewards: {self.config.title} shows images to the remote model {name!r}, and "
                    f"the recipe does not say that it takes any: set remote_models.{name}."
                    "sees_images=true, or remove the reward's `images`"
                )

    async def scores(
        self,
        trajectories: Sequence[Trajectory],
        task: Task,
        calls: Calls,
        policy: ScoredPolicy | None,
        images: Mapping[str, ImageFile],
    ) -> list[Score | ScorerFailure]:
        """A score or a failure for each trajectory, in order. Raises InfrastructureFailure if the
        policy can't be reached."""
        if self.judges_groups:
            return await self._score_group(trajectories, task, calls, images)
        if policy is None and self.asks_policy:
            return [ScorerFailure(NO_POLICY.format(self.config.title))] * len(trajectories)
        singles = [
            self._score_single(trajectory, task, calls, policy, images)
            for trajectory in trajectories
        ]
        return list(await asyncio.gather(*singles))

    @contextmanager
    def _record_call(
        self, trajectories: Sequence[Trajectory], calls: Calls
    ) -> Iterator[Callable[[Sequence[Score | Unscored]], None]]:
        """A block that is recorded as a call of each of these attempts. Yields a function that
        notes the scores, which come in the order of the attempts."""
        with ExitStack() as stack:
            calls_by_id = {
                trajectory.id: calls[trajectory.id]
                for trajectory in trajectories
                if trajectory.id in calls
            }
            recorded = {
                name: stack.enter_context(attempt_calls.call("scorer", self.config.title))
                for name, attempt_calls in calls_by_id.items()
            }

            def note(scores: Sequence[Score | Unscored]) -> None:
                for trajectory, score in zip(trajectories, scores, strict=True):
                    call = recorded.get(trajectory.id)
                    if call is not None and isinstance(score, Unscored):
                        call.keep(reason="\n".join(filter(None, (score.why, score.evidence))))
                        call.outcome("failed", score.why)
                    elif call is not None and isinstance(score, Score):
                        call.note(score=score.value)
                        call.keep(reason=score.reason)

            yield note

    async def _score_single(
        self,
        trajectory: Trajectory,
        task: Task,
        calls: Calls,
        policy: ScoredPolicy | None,
        images: Mapping[str, ImageFile],
    ) -> Score | ScorerFailure:
        trajectory_copy = copy_of_trajectory(trajectory)
        task = copy_of_task(task)

        async def work() -> Score:
            with self._record_call([trajectory], calls) as note:
                score = await judge()
                note([score])
                return score

        async def judge() -> Score:
            if hasattr(self._item, "score"):
                function = self._item.score
                returned = await call_scorer(
                    self._item, trajectory_copy, task, self._models, images, policy, self._sandboxes
                )
            else:
                function = self._item
                returned = await self._call(
                    call_function(function, trajectory_copy, task, self._models, images)
                )

            try:
                return score_of(returned)
            except (TypeError, ValueError) as error:
                error.add_note(f"It was returned by {describe_function(function)}.")
                raise

        return await self._within_limit(work, self.config.timeout_s)

    async def _score_group(
        self,
        trajectories: Sequence[Trajectory],
        task: Task,
        calls: Calls,
        images: Mapping[str, ImageFile],
    ) -> list[Score | ScorerFailure]:
        copies = [copy_of_trajectory(t) for t in trajectories]
        task = copy_of_task(task)

        async def work() -> list[Score | Unscored]:
            with self._record_call(trajectories, calls) as note:
                scores = read(
                    await call_group_scorer(self._item, copies, task, self._models, images)
                )
                note(scores)
                return scores

        def read(returned: Any) -> list[Score | Unscored]:
            if isinstance(returned, Mapping | Set):
                raise TypeError(
                    f"score_group returned a {type(returned).__name__}: return a list with the "
                    "scores of the attempts in their order"
                )

            scores = [
                score if isinstance(score, Unscored) else score_of(score)
                for score in islice(returned, len(trajectories) + 1)
            ]
            if len(scores) != len(trajectories):
                many = "more" if len(scores) > len(trajectories) else str(len(scores))
                raise ValueError(f"{many} scores for {len(trajectories)} attempts")

            return scores

        scores = await self._within_limit(work, self.config.timeout_s)
        if isinstance(scores, ScorerFailure):
            return [scores] * len(trajectories)

        return [
            self._failure(score.why) if isinstance(score, Unscored) else score for score in scores
        ]

    async def _call(self, call: Callable[[], Any]) -> Any:
        """A plain function runs on a thread of its own, so a function that hangs blocks nothing
        else."""
        thread = EnvironmentThread(self._pace, REWARD)
        try:
            returned = await thread.call(call)
        finally:
            await thread.end(lambda: None)
        return await returned if inspect.isawaitable(returned) else returned

    async def _within_limit(self, work: Callable[[], Any], limit_s: float) -> Any:
        """The result of the work, or the failure if there is no result. A scorer that does not end
        after it is cancelled is abandoned."""
        scope = TaskScope()
        working = scope.start(_guard(lambda: self._notices.run(work())))
        late = False
        try:
            await asyncio.wait([working], timeout=limit_s)
            late = not working.done()
        finally:
            scope.cancel()
            if not working.done():
                await asyncio.wait([working], timeout=CANCEL_TIMEOUT_S)

        error: BaseException | None = None
        if late:
            what = f"no score within timeout_s={limit_s:g} s"
        elif working.cancelled():
            what = "CancelledError: it cancelled itself"
        else:
            error = working.exception()
            if error is None:
                return working.result()
            is_engines = self.asks_policy and isinstance(error, InfrastructureFailure)
            if is_engines or isinstance(error, Interrupt):
                raise error
            what = describe_error(error)

        failure = self._failure(what)
        failure.raised = error
        return failure

    def _failure(self, what: str) -> ScorerFailure:
        return ScorerFailure(f"the reward {self.config.title!r} failed: {what}")


async def _guard(work: Callable[[], Any]) -> Any:
    """Runs the work. Raises OverreachError for SystemExit and KeyboardInterrupt, which would end
    the event loop."""
    try:
        return await work()
    except Interrupt:
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        raise OverreachError(error, REWARD) from error


class Scoring:
    """All rewards of a run, each created once."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        show: ShowFailure = lambda name, error, trace: None,
        models: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`show` is called for each attempt that could not be scored. `models`: the remote models
        that rewards may use."""
        self._show = show
        self._models = models
        self._configured = [NamedReward(config, models) for config in configs]
        self._named = {reward.config.title: reward for reward in self._configured}

    def check(self, tasks: Sequence[Task], *, needed: bool) -> None:
        """Raises ConfigError if a task names an unknown reward, if a task has no scorer although a
        scorer is `needed`, and if a reward needs a remote model that the recipe does not have."""
        for reward in self._configured:
            reward.check()

        for task in tasks:
            is_judged = bool(self._configured) or task.scorer is not None
            if needed and not is_judged and STATE_CHECKS not in task.metadata:
                raise ConfigError(
                    f"rewards: nothing judges the task {task.id!r}: set rewards=[exact_match] "
                    "(`agentevo list rewards` has others), or give each row a scorer"
                )

            if task.scorer is not None:
                try:
                    for reward in self._rewards_of(task):
                        reward.check()
                except ConfigError as error:
                    raise ConfigError(f"tasks: {task.id!r}: scorer: {error}") from error

    def compares(self, task: Task) -> bool:
        """Whether the task's rewards depend on the other attempts of its group."""
        return any(reward.judges_groups for reward in self._rewards_of(task))

    def asks_models(self, task: Task) -> bool:
        """Whether the task's rewards depend on replies of remote models."""
        return any(reward.asks_models for reward in self._rewards_of(task))

    def sees_images(self, task: Task) -> bool:
        """Whether the task's rewards depend on the images of the attempts."""
        return any(reward.sees_images for reward in self._rewards_of(task))

    def asks_policy(self, task: Task) -> bool:
        """Whether the task's rewards depend on the policy's weights."""
        return any(reward.asks_policy for reward in self._rewards_of(task))

    @property
    def prepares(self) -> bool:
        """Whether a reward of the recipe uses the policy, and so may have a `prepare`."""
        return any(reward.asks_policy for reward in self._configured)

    async def prepare(self, tasks: Sequence[Task], policy: ScoredPolicy) -> None:
        """Lets the recipe's rewards use the policy before training starts. Raises
        InfrastructureFailure."""
        for reward in self._configured:
            judged = [
                task for task in tasks if task.scorer is None or reward in self._rewards_of(task)
            ]
            await reward.prepare(judged, policy)

    def configs(self, tasks: Sequence[Task]) -> list[RewardConfig]:
        """The recipe's rewards, and the tasks' own rewards."""
        task_rewards = [
            reward for task in tasks if task.scorer for reward in self._rewards_of(task)
        ]
        return list(
            {id(reward): reward.config for reward in (*self._configured, *task_rewards)}.values()
        )

    def _rewards_of(self, task: Task) -> list[NamedReward]:
        """The task's rewards of all stages."""
        if task.scorer is None:
            return self._configured
        return [self._reward(name) for name in scorers_of(task)]

    def _rewards_at(self, task: Task, step: int | None) -> list[NamedReward]:
        """The rewards that count at a training step, or in an evaluation. The task's own rewards
        always count."""
        rewards = self._rewards_of(task)
        return rewards if task.scorer else [r for r in rewards if r.config.counts_at(step)]

    def _reward(self, name: str) -> NamedReward:
        if name not in self._named:
            options = reward_config(name)
            try:
                config = options(name=name)
            except pydantic.ValidationError as error:
                missing = ", ".join(".".join(map(str, wrong["loc"])) for wrong in error.errors())
                raise ConfigError(
                    f"{name} needs options ({missing}), and a row can't give any: list it in the "
                    "recipe, rewards=[{name: " + name + ", ...}]"
                ) from error

            self._named[name] = NamedReward(config, self._models)

        return self._named[name]

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        unrewarded: Sequence[bool],
        calls: Calls,
        *,
        task: Task,
        policy: ScoredPolicy | None = None,
        images: Mapping[str, ImageFile] = MappingProxyType({}),
    ) -> list[Trajectory]:
        """Scores the trajectories of one group, and returns them in order with their rewards.
        Trajectories that are not completed stay unchanged. `unrewarded`: ids of the trajectories
        whose agent returned no reward. `policy`: the policy that made them, if its engine can be
        reached. `images`: the images that the trajectories name, by digest. Raises
        InfrastructureFailure if the engine fails."""
        judged = [t for t in trajectories if t.status == "completed"]
        step = step_of(trajectories[0].group_id) if trajectories else None
        rewards = self._rewards_at(task, step)
        if not rewards:
            return [
                self._failed_trajectory(t, NO_REWARD) if missing and t.status == "completed" else t
                for t, missing in zip(trajectories, unrewarded, strict=True)
            ]

        # The only scorer of a task decides alone, whatever its weight in the recipe's list.
        is_only_scorer = len(scorers_of(task)) == 1
        weights = [1.0 if is_only_scorer else reward.config.weight for reward in rewards]
        columns = [
            await reward.scores(judged, task, calls, policy, images)
            for reward in (rewards if judged else ())
        ]
        keeps_own = any(reward.keeps_own_reward for reward in rewards)
        rows = {t.id: list(row) for t, *row in zip(judged, *columns, strict=True)}

        return [
            self._with_scores(
                _with_own_reward(t) if keeps_own and not missing else t,
                rewards,
                weights,
                rows[t.id],
            )
            if t.id in rows
            else t
            for t, missing in zip(trajectories, unrewarded, strict=True)
        ]

    def _with_scores(
        self,
        trajectory: Trajectory,
        rewards: Sequence[NamedReward],
        weights: Sequence[float],
        scores: Sequence[Score | ScorerFailure],
    ) -> Trajectory:
        failures = [score for score in scores if isinstance(score, ScorerFailure)]
        if failures:
            return self._failed_trajectory(
                trajectory, "; ".join(map(str, failures)), failures[0].raised
            )
        try:
            return _with_scores(trajectory, rewards, weights, scores)
        except ValueError as error:
            return self._failed_trajectory(trajectory, describe_error(error))

    def _failed_trajectory(
        self, trajectory: Trajectory, error: str, raised: BaseException | None = None
    ) -> Trajectory:
        self._show(trajectory.id, error, traceback_of(raised))
        return replace(
            trajectory, status="failed", error=error, reward=0.0, reward_parts={}, success=False
        )


def _with_own_reward(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its own reward (the agent's or the environment's) as a metric, because
    another reward replaces it."""
    return replace(trajectory, metrics={**trajectory.metrics, OWN_REWARD: trajectory.reward})


def _with_scores(
    trajectory: Trajectory,
    rewards: Sequence[NamedReward],
    weights: Sequence[float],
    scores: Sequence[Score | ScorerFailure],
) -> Trajectory:
    """The trajectory with the weighted sum of its scores as reward. Raises ValueError if the sum is
    not a valid reward."""
    parts: dict[str, float] = {}
    success = False
    is_met = _find_met(rewards, scores)
    for index, (reward, weight, score) in enumerate(zip(rewards, weights, scores, strict=True)):
        assert isinstance(score, Score)
        if not all(is_met.get(name, True) for name in reward.config.requires):
            score = Score(0.0, dict.fromkeys(score.parts, 0.0), success=False)
        if index == 0:
            success = score.is_success

        name = reward.config.title
        named_parts = {f"{name}/{part}": value for part, value in score.parts.items()}
        for part, value in (named_parts or {name: score.value}).items():
            parts[part] = parts.get(part, 0.0) + weight * value

    total = plain_number(sum(parts.values()), "the weighted sum of its rewards")
    return replace(trajectory, reward=total, reward_parts=parts, success=success)


def _find_met(
    rewards: Sequence[NamedReward], scores: Sequence[Score | ScorerFailure]
) -> dict[str, bool]:
    """Whether each reward is met, by its name. A reward is met if it succeeded and all rewards that
    it requires are met."""
    is_met = {
        reward.config.title: isinstance(score, Score) and score.is_success
        for reward, score in zip(rewards, scores, strict=True)
    }
    needed = {reward.config.title: reward.config.requires for reward in rewards}
    while blocked := [
        name
        for name in is_met
        if is_met[name] and not all(is_met.get(required, True) for required in needed[name])
    ]:
        is_met |= dict.fromkeys(blocked, False)

    return is_met
