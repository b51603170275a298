"""The sampler: lets an agent attempt tasks several times each, and writes the trajectories to the
store.

`sample` is one pass over given tasks, for evaluations and for training that alternates with
sampling. It leases nothing. Both `sample` and the service (service.py) use `group` for a task.
Attempts of all groups run at the same time and share the engine's steps. A failure inside an
attempt becomes a `failed` trajectory with the reason. Its group has one member less, and the run
continues. A failure of the engine is not an attempt's failure. The group starts again, a limited
number of times, and then the pass ends with the engine's error.

A sampler whose policy is a remote model: the same agents, groups and scorers, without an
engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from agentevo.agents.agent import Agent
from agentevo.agents.gateway.gateway import Gateway
from agentevo.agents.named_texts import Declared, TextKeeper, Texts
from agentevo.agents.policy import Policy, PolicyGateway
from agentevo.agents.remote_policy import RemoteModelPolicy, RemotePolicyConversation
from agentevo.config import RunConfig
from agentevo.config.named_agents import remote_agents, trained_agents
from agentevo.config.sections import SamplingSection
from agentevo.config.self_play import PROPOSER, SOLVER
from agentevo.data.message_images import ImageCollector
from agentevo.errors import ConfigError, DeadlineExceededError, EngineError, EngineUnavailableError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.engine import Engine
from agentevo.inference.remote_models import RemoteConversations, RemoteModels
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.rewards.baselines import BaselineScorers
from agentevo.rollout.attempt_images import (
    AttemptImages,
    check_sees,
    put_images_of_tasks,
    what_shows_images,
)
from agentevo.rollout.failures import FirstFailures
from agentevo.rollout.group import GroupAttempt, InfrastructureFailure, RolloutGroup, write_group
from agentevo.rollout.policy_scores import BASELINES, PolicyScores
from agentevo.rollout.scoring import Scoring, step_of
from agentevo.rollout.self_play import role_of
from agentevo.rollout.teachers import Teachers
from agentevo.runtime.event_loop import gather_all
from agentevo.runtime.progress import bar
from agentevo.runtime.retry import with_retries
from agentevo.runtime.seeds import derive_seed
from agentevo.store.call_log import AttemptCalls, CallLog
from agentevo.store.records import RETRIES, Split
from agentevo.store.store import Store
from agentevo.types import SamplingOverrides, SamplingParams, Task, Trajectory, group_of_agent
from agentevo.types.copies import copy_of_task
from agentevo.types.images import ImageFile

T = TypeVar("T")

REMOTE_MODELS = "remote_models"
"""The folder in the run's folder with the logs of what remote models cost."""
BASELINE = "baseline"
"""The label of the greedy attempt that accompanies a group."""


def group_name(task_id: str, label: str, step: int) -> str:
    """The id of a task's group in a pass."""
    return f"{task_id}/{label}@{step}"


def group_of_all(group_id: str) -> str:
    """The id of the group over all agents, from the id of one agent's group. The inverse of
    `group_of_agent`."""
    beginning, _, step = group_id.rpartition("@")
    return f"{beginning}@{step.partition(':')[0]}"


def agent_of_group(group_id: str) -> str:
    """The agent that the group belongs to. Empty if the run has a single agent."""
    return group_id.rpartition("@")[2].partition(":")[2]


def sampling_params(
    section: SamplingSection, chat: ChatFormat, temperature: float
) -> SamplingParams:
    """The section's parameters at a temperature, for a model with this chat format."""
    return SamplingParams(
        temperature=temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_new_tokens=section.max_new_tokens,
        stop_token_ids=chat.end_ids,
        stop_strings=section.stop,
    )


class Player(NamedTuple):
    """The engine, chat format and context length of one of several agents."""

    engine: Engine
    chat: ChatFormat
    context_length: int


class Sampler:
    """Plays tasks with the run's agent and scores the attempts. The same sampler serves training
    and evaluation."""

    def __init__(  # noqa: PLR0913 (what several agents and a program's own loop need is optional)
        self,
        config: RunConfig,
        engine: Engine,
        chat: ChatFormat,
        agent: Agent,
        store: Store,
        context_length: int,
        *,
        calls: CallLog | None = None,
        note: Callable[[str], None] = lambda text: None,
        players: Mapping[str, Player] = MappingProxyType({}),
        gateway: PolicyGateway | None = None,
        get_tasks: Callable[[], Sequence[Task]] = tuple,
        task_images: Mapping[str, ImageFile] = MappingProxyType({}),
    ) -> None:
        """`calls` records the calls of attempts, unless it is None. `note` receives the first
        failure of each kind and its traceback at once. `players`: maps the names of several agents
        to their players, in place of `engine`, `chat` and `context_length`. `get_tasks`: returns
        the run's tasks that do not come from an environment, for rewards that need the tasks before
        training starts. `task_images`: the images of tasks that this process has read, by digest;
        the others come from the store. `gateway`: serves the API clients of attempts; by default
        the sampler creates its own, which listens when an agent first needs it and ends with
        `close`. Raises ConfigError for tasks or an environment with images if no model sees."""
        self._config = config
        self._player = Player(engine, chat, context_length)
        self._players = players
        self._trained = trained_agents(config)
        self._has_roles = config.tasks.self_play is not None
        self._agent = agent
        self._store = store
        self._calls = calls
        self._note = note
        self.failures = FirstFailures(note)
        self._own_gateway = Gateway(
            config.gateway, model=config.model.name, timeout_s=config.engine.timeout_s, note=note
        )
        self._gateway: PolicyGateway = gateway or self._own_gateway
        self.remote_models = RemoteModels(config.remote_models, config.run_dir / REMOTE_MODELS)
        self._scoring = Scoring(config.rewards, show=self.failures.show, models=self.remote_models)
        self._teachers = Teachers(config.distillation, self.remote_models, self.failures.show)
        self._baselines = BaselineScorers(config.run_dir / BASELINES)
        self._get_tasks = get_tasks
        self.use_images(task_images)
        self._preparing: asyncio.Task[None] | None = None
        self._keep_text = TextKeeper(config.run_dir)
        self.declared: dict[str, Declared] = {}
        """The named texts that attempts have used."""

    def use_images(self, images: Mapping[str, ImageFile]) -> None:
        """Images of tasks, by digest, as the argument `task_images`. Raises ConfigError if no model
        sees, also for an environment with images."""
        players = self._players.values() or [self._player]
        check_sees(self._config, images, [player.chat for player in players])
        self.task_images = images

    def close(self) -> None:
        """Ends its own gateway and the remote models, if an agent used them, and reports their
        cost."""
        self._own_gateway.close()
        for line in self.remote_models.account():
            self._note(line)
        self.remote_models.close()

    def sampling(self, temperature: float) -> SamplingParams:
        """The recipe's sampling parameters; filters have no effect on greedy sampling."""
        return sampling_params(self._config.sampling, self._player.chat, temperature)

    async def sample(
        self,
        tasks: Sequence[Task],
        *,
        attempts: int,
        temperature: float,
        split: Split,
        step: int,
        label: str,
        baseline: bool = False,
        write: bool = True,
        attempts_by_task: Mapping[str, int] = MappingProxyType({}),
    ) -> list[Trajectory]:
        """Makes `attempts` trajectories of each task, or those in `attempts_by_task` (by id), in
        the order of tasks and attempts. Writes them to the store as `split` of `step`.

        `label` distinguishes passes over the same tasks ("train", "greedy", "sampled"). It is part
        of ids and seeds. With `baseline`, a greedy attempt at the same task runs with each group,
        as a separate group (label BASELINE). For training, `rollout.extra_attempts` more attempts
        start. A group that is already in the store is read and not sampled again. `write=False`
        leaves the writing to a later `write`.

        If the engine fails, is late or can't be reached, the group starts again, as often as the
        store's RetryPolicy allows. After that, raises EngineError, and no part of the group is
        written.
        """
        await put_images_of_tasks(self._store, tasks, self.task_images)
        await with_retries(lambda: self._store.add_tasks(tasks, queue=False), what="add_tasks")
        labels = (label, BASELINE) if baseline else (label,)
        names = [name for task in tasks for name in self._group_names(task, labels, step)]
        stored_groups = await with_retries(
            lambda: self._find_stored(names, split, step), what="known groups"
        )
        extra = self._config.rollout.extra_attempts if split == "train" else 0
        wanted = {task.id: attempts_by_task.get(task.id, attempts) for task in tasks}
        num_ended = dict[str, int]()

        def count_ended(task: Task, number: int) -> None:
            progress.advance(number - num_ended.get(task.id, 0))
            num_ended[task.id] = number

        async def group(task: Task) -> list[Trajectory]:
            stored = [stored_groups.get(name, []) for name in self._group_names(task, labels, step)]
            if len(stored[0]) >= wanted[task.id] and all(stored):
                count_ended(task, wanted[task.id] + extra + baseline)
                return list(itertools.chain(*stored))

            trajectories = await self.play(
                task,
                attempts=wanted[task.id],
                extra=extra,
                temperature=temperature,
                step=step,
                label=label,
                baseline=baseline,
                on_ended=partial(count_ended, task),
            )
            return await self.write(trajectories, split=split, step=step) if write else trajectories

        total = sum(wanted.values()) + len(tasks) * (extra + baseline)
        with bar(f"playing ({label})", total, "attempts") as progress:
            groups = await gather_all([group(task) for task in tasks])

        return list(itertools.chain(*groups))

    async def write(
        self, trajectories: Sequence[Trajectory], *, split: Split, step: int
    ) -> list[Trajectory]:
        """See group.write_group."""
        return await write_group(self._store, trajectories, split=split, step=step)

    @property
    def engines(self) -> dict[str, Engine]:
        """The player of each agent by its name. A single agent has an empty name."""
        players = self._players or {"": self._player}
        return {name: player.engine for name, player in players.items()}

    def _group_names(self, task: Task, labels: Sequence[str], step: int) -> list[str]:
        """Ids of the groups that a pass makes of a task: all labels of each agent. Under self-play,
        a task belongs to one agent."""
        names = [group_name(task.id, label, step) for label in labels]
        agents = (role_of(task),) if self._has_roles else self._players or ("",)
        return [group_of_agent(name, agent) for agent in agents for name in names]

    def group(  # noqa: PLR0913 (the ways in which a step, an evaluation and a search play)
        self,
        task: Task,
        *,
        attempts: int,
        extra: int = 0,
        temperature: float,
        step: int,
        label: str,
        baseline: bool = False,
        shown: Task | None = None,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        on_ended: Callable[[int], None] = lambda number: None,
        texts: Mapping[str, str] | None = None,
    ) -> RolloutGroup:
        """The group of attempts at the task, before it starts, with `attempts` wanted and `extra`
        further attempts. When the wanted number is complete, the group cancels the others.

        `shown` is the task as the agent receives it. `engines`: see `policy`. `on_ended`: see
        RolloutGroup. `texts`: named texts that replace the recipe's.
        """
        name = group_name(task.id, label, step)
        limit = self._config.agent.timeout_s
        name = group_of_agent(name, role_of(task)) if self._has_roles else name

        def attempt(group_id: str, number: int, temperature: float) -> GroupAttempt:
            attempt_id = f"{group_id}#{number}"
            return GroupAttempt(
                self._agent,
                copy_of_task(shown or task),
                self.policy(attempt_id, temperature, engines, texts=texts),
                name=attempt_id,
                limit_s=limit,
                show=self.failures.show,
            )

        members = [attempt(name, number, temperature) for number in range(attempts + extra)]
        baseline_id = group_name(task.id, BASELINE, step)
        greedy = (baseline_id, attempt(baseline_id, 0, 0.0)) if baseline else None
        return RolloutGroup(
            task.id,
            name,
            members,
            num_wanted=attempts,
            baseline=greedy,
            score=partial(self._score, task=shown or task, engines=engines),
            images=self._images_of(shown or task),
            on_ended=on_ended,
        )

    def _images_of(self, task: Task) -> AttemptImages:
        return AttemptImages(self._store, self.task_images, task)

    def check_scorer(self, task: Task) -> None:
        """Raises AgentEvoError if the task's own scorer is unknown, or can't be created."""
        self._scoring.compares(task)

    async def _score(
        self,
        trajectories: Sequence[Trajectory],
        unrewarded: Sequence[bool],
        calls: Mapping[str, AttemptCalls],
        images: Mapping[str, ImageFile],
        *,
        task: Task,
        engines: Mapping[str, Engine],
    ) -> list[Trajectory]:
        """See Scoring.score. An agent that is not trained gets no score: it keeps its own reward,
        or 0. A proposer gets its reward later (self_play.py). With distillation, a teacher then
        scores the tokens of the attempts that are trained on."""
        agent = trajectories[0].agent
        is_proposer = self._has_roles and agent == PROPOSER
        if is_proposer or (self._players and agent not in self._trained):
            return list(trajectories)

        player = self._players.get(agent, self._player)
        engine = engines.get(agent, player.engine)
        policy = PolicyScores(self._config, engine, player.chat, self._baselines, agent)
        if self._scoring.prepares:
            await self._wait_for_rewards(policy)

        scored = await self._scoring.score(
            trajectories, unrewarded, calls, task=task, policy=policy, images=images
        )
        group_id = trajectories[0].group_id
        is_baseline = group_id.startswith(f"{task.id}/{BASELINE}@")
        if not self._config.distillation.enabled or is_baseline or step_of(group_id) is None:
            return scored

        return await self._teachers.score(scored, calls, task)

    async def _wait_for_rewards(self, policy: PolicyScores) -> None:
        """Waits until the rewards have their inputs from the run's initial policy. The first group
        can't be scored before, so no step changes that policy. After a failure, the next call
        starts the preparation again."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._scoring.prepare(self._get_tasks(), policy))

        preparing = self._preparing
        try:
            await asyncio.shield(preparing)
        except BaseException:
            if preparing is self._preparing and preparing.done():
                self._preparing = None
            raise

    def policy(
        self,
        name: str,
        temperature: float,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        *,
        texts: Mapping[str, str] | None = None,
    ) -> Policy:
        """The policy of the attempt with that name. `engines`: replace the run's engines, by the
        names of the agents (empty for a single agent). `texts`: see `group`."""
        group_id, _, number = name.rpartition("#")
        run_seed = self._config.run.seed
        models = self.remote_models
        images = ImageCollector()

        def conversation(agent: str, trajectory_id: str) -> Conversation:
            player = self._players.get(agent, self._player)
            return Conversation(
                engines.get(agent, player.engine),
                player.chat,
                sampling_params(self._config.sampling, player.chat, temperature),
                name=trajectory_id,
                seed=derive_seed(run_seed, trajectory_id),
                context_length=player.context_length,
                timeout_s=self._config.engine.timeout_s,
                calls=AttemptCalls(self._calls, trajectory_id),
                images=images,
            )

        agents = {
            agent: conversation(agent, f"{group_of_agent(group_id, agent)}#{number}")
            for agent in (() if self._has_roles else self._players)
        }
        role = (agent_of_group(group_id) or SOLVER) if self._has_roles else ""
        main = agents[self._trained[0]] if agents else conversation(role, name)
        remote = None
        if models:
            seed = derive_seed(run_seed, main.name)
            remote = RemoteConversations(
                models, name=main.name, seed=seed, calls=main.calls, images=main.images
            )

        remote_names = remote_agents(self._config)
        attempt_texts = self.texts(texts)
        return Policy(main, self._gateway, remote, agents, remote_names, attempt_texts)

    def texts(self, overrides: Mapping[str, str] | None = None) -> Texts:
        """The named texts of an attempt: `overrides`, or else the recipe's."""
        texts = self._config.agent.texts if overrides is None else overrides
        return Texts(texts, self._keep_text, self.declared.setdefault)

    async def play(self, task: Task, **arguments: Any) -> list[Trajectory]:
        """Runs the group that `group(task, **arguments)` returns. Runs it again if the engine
        fails, a limited number of times. Writes nothing."""
        failures = 0
        while True:
            try:
                return await self.group(task, **arguments).run()
            except InfrastructureFailure as error:
                failures += 1
                if failures == RETRIES.max_failures:
                    raise _final_error(failures, error) from error
            await asyncio.sleep(RETRIES.delay_s(failures))

    async def _find_stored(
        self, groups: Sequence[str], split: Split, step: int
    ) -> dict[str, list[Trajectory]]:
        """Those of the groups that are in the store with their tokens, as a map from id to members
        in order. A group is written whole, so all its members are there."""
        summaries = await self._store.summaries(split=split, step=step)
        stored_groups: dict[str, list[Trajectory]] = {}
        for name in {summary.group_id for summary in summaries} & set(groups):
            rows = [row async for row in self._store.trajectories(group_id=name, split=split)]
            if not any(row.tokens_deleted for row in rows):
                stored_groups[name] = sorted(
                    (row.trajectory for row in rows), key=lambda trajectory: trajectory.attempt
                )

        return stored_groups


def _final_error(tries: int, error: InfrastructureFailure) -> EngineError:
    kind = (
        EngineUnavailableError
        if isinstance(error.__cause__, EngineUnavailableError)
        else EngineError
    )
    has_remedy = isinstance(error.__cause__, (EngineUnavailableError, DeadlineExceededError))
    remedy = (
        "" if has_remedy else "; if memory is short, lower engine.kv_cache_gb or engine.max_running"
    )
    return kind(f"failed {tries} times, last with: {error}{remedy}")


class RemoteSampler(Sampler):
    """Samples from a remote model. It plays (`play`, `group`) and writes nothing to a store."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        agent: Agent,
        note: Callable[[str], None] = lambda text: None,
        calls: CallLog | None = None,
    ) -> None:
        """`model`: a name in the recipe's `remote_models`. The recipe has no named agents."""
        self._model = model
        nothing = cast("Any", None)  # no engine samples tokens here, and no store keeps them
        super().__init__(config, nothing, nothing, agent, nothing, 0, calls=calls, note=note)

    def use_images(self, images: Mapping[str, ImageFile]) -> None:
        """See Sampler. Raises ConfigError if the remote model takes none."""
        shown = what_shows_images(self._config, images)
        if shown and not self.remote_models[self._model].sees_images:
            raise ConfigError(
                f"{shown}, and the remote model {self._model} reads text alone: set "
                f"remote_models.{self._model}.sees_images=true if it takes images, or leave images "
                "out"
            )
        self.task_images = images

    def _images_of(self, task: Task) -> AttemptImages:
        return AttemptImages(None, self.task_images, task)

    async def _score(
        self,
        trajectories: Sequence[Trajectory],
        unrewarded: Sequence[bool],
        calls: Mapping[str, AttemptCalls],
        images: Mapping[str, ImageFile],
        *,
        task: Task,
        engines: Mapping[str, Engine],
    ) -> list[Trajectory]:
        """See Sampler. No reward can use an engine here."""
        return await self._scoring.score(trajectories, unrewarded, calls, task=task, images=images)

    def policy(
        self,
        name: str,
        temperature: float,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        *,
        texts: Mapping[str, str] | None = None,
    ) -> Policy:
        section = self._config.sampling
        sampling = SamplingOverrides(
            temperature=temperature,
            top_p=section.top_p if section.top_p < 1 else None,
            top_k=section.top_k or None,
            min_p=section.min_p or None,
            max_new_tokens=section.max_new_tokens,
            stop_strings=section.stop or None,
        )

        calls = AttemptCalls(self._calls, name)
        seed = derive_seed(self._config.run.seed, name)
        remote = RemoteConversations(self.remote_models, name=name, seed=seed, calls=calls)
        conversation = RemotePolicyConversation(
            remote, self._model, sampling, name=name, calls=calls
        )
        attempt_texts = self.texts(texts)
        return RemoteModelPolicy(conversation, self._gateway, remote, self._model, attempt_texts)
