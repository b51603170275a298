"""Replay: repeats a trajectory from its task, its seeds and the stored weights, and compares the
result with the record.

It has two halves. The first half samples every token again under the version that the record names
for it (resampling.py). In the second half, the agent plays the task again with an engine that
compares each request and answers with the recorded completion. If neither half finds a difference,
the agent, environment, engine and weights reproduce the record, by induction over its tokens.

Agents and environments that are not deterministic (clocks, networks) play other episodes. The
replay then names the first prompt that differs. If a run was resumed with other sampling or agent
keys, the replay uses the last ones.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress

import msgspec

from agentevo.agents import Agent, Policy
from agentevo.agents.named_texts import Texts
from agentevo.agents.policy import AttemptSession
from agentevo.config import RunConfig
from agentevo.config.agents import brings_tasks
from agentevo.config.named_agents import weights_of
from agentevo.config.self_play import PROPOSER
from agentevo.data.message_images import ImageCollector
from agentevo.errors import CheckpointError, EngineError, StoreError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.default_engine import OWN
from agentevo.inference.remote_models import RemoteConversations
from agentevo.models.chat.chat_format import ChatFormat, chat_of
from agentevo.models.compute.positions import context_length
from agentevo.rollout.group import GroupAttempt, InfrastructureFailure
from agentevo.rollout.sampler import sampling_params
from agentevo.rollout.scoring import Scoring
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.audit.recorded import RecordedEngine, RecordedModels
from agentevo.runs.audit.resampling import Difference, DifferenceKind, resample
from agentevo.runs.audit.stored_weights import Source, StoredVersions, load_version, rebuild
from agentevo.runs.orchestration.components import AgentFunction
from agentevo.runs.orchestration.players import find_agent
from agentevo.runtime.progress import bar, over
from agentevo.runtime.seeds import derive_seed
from agentevo.store.codec import is_as_written
from agentevo.store.opening import open_store
from agentevo.store.store import Store
from agentevo.types import SamplingParams, Task, Trajectory
from agentevo.types.images import ImageFile, images_of_task, images_of_trajectory

REWARD_TOLERANCE = 1e-9


class TrajectoryReplay(msgspec.Struct, kw_only=True):
    """The result of a replay."""

    trajectory: str
    versions: list[int]
    """The versions of the weights that sampled the trajectory."""
    tokens: int = 0
    """The number of tokens that were sampled again."""
    ties: int = 0
    """How many of these tokens agree only within rounding (resampling.py)."""
    unsampled: str = ""
    """Why the tokens can't be sampled again, so that only the agent played the task again. Empty if
    they were sampled again."""
    turns: int = 0
    """The number of turns that the agent requested again. It is smaller than recorded only after a
    difference."""
    remote_turns: int = 0
    """The number of recorded answers of remote models that the agent requested again."""
    unplayed: str = ""
    """Why no agent played the task, so that only the tokens were sampled again. Empty if an agent
    played it."""
    reward: float = 0.0
    """The reward in the record."""
    replayed_reward: float | None = None
    """The reward of the replay. None if the record (failed, cancelled) or the replay ended
    early."""
    difference: Difference | None = None
    """The first difference."""

    @property
    def same(self) -> bool:
        return self.difference is None

    @property
    def played(self) -> bool:
        """Whether the agent played the task again."""
        return not self.unplayed

    def note(self, kind: DifferenceKind, turn: int, what: str, position: int = 0) -> None:
        """Notes a difference. The first one in the trajectory counts."""
        self.keep_first(Difference(kind=kind, turn=turn, position=position, what=what))

    def keep_first(self, *differences: Difference | None) -> None:
        """Keeps the first of these differences and of those before."""
        known = [each for each in (self.difference, *differences) if each is not None]
        self.difference = min(known, key=lambda difference: difference.place, default=None)

    def line(self) -> str:
        """The result as one line to print."""
        summary = (
            f"{self.tokens} tokens of {len(self.versions)} version{'s' * (len(self.versions) != 1)}"
        )
        if self.difference is not None:
            return f"{self.trajectory}: DIFFERS ({summary}): {self.difference.what}"

        ties = f", {self.ties} of them within rounding" if self.ties else ""
        compared = f"same ({summary}{ties}"
        if self.unsampled:
            compared = f"tokens can't be sampled again ({self.unsampled}"
        remote = f"{self.remote_turns} answers of remote models from the record; "
        played = f"not played again: {self.unplayed}"
        if self.played and self.replayed_reward is None:
            played = "it failed, as recorded"
        elif self.played:
            played = f"reward {self.replayed_reward:g}"

        return f"{self.trajectory}: {compared}; {remote if self.remote_turns else ''}{played})"


async def replay(
    config: RunConfig,
    trajectory_id: str | None = None,
    *,
    sample: int = 0,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    made_again: bool = False,
) -> list[TrajectoryReplay]:
    """Replays a single trajectory, or `sample` training trajectories with available weights, chosen
    at random by the run's seed.

    Available weights are those in the run's folder. With `made_again`, those that
    stored_weights.py can rebuild are available too. Raises StoreError for an unknown trajectory,
    and CheckpointError if the weights are gone.
    """
    source = TaskSource(config, tasks)
    async with await open_store(config.store_url, create=False) as store:
        if trajectory_id is not None:
            chosen = [await store.trajectory(trajectory_id)]
        else:
            chosen = await _sample(config, store, sample, made_again=made_again)
        altered = await _find_altered(store, chosen)
        images = await _images_of(store, chosen)
        shown = {t.task_id: source.as_agent_task(await store.task(t.task_id)) for t in chosen}

    replays = dict[str, TrajectoryReplay]()
    chat = None
    context = 1 << 30
    for policy in sorted({weights_of(config, t.agent) for t in chosen}):
        policy_trajectories = [t for t in chosen if weights_of(config, t.agent) == policy]
        stored = StoredVersions(config, policy)
        versions = sorted({version for t in policy_trajectories for version in versions_of(t)})
        missing = set(versions) - set(stored.available_versions()) if made_again else set()
        rebuilding = rebuild(config, missing, agent=agent, tasks=tasks, policy=policy)
        async with aclosing(rebuilding) as rebuilt:
            sources = _sources(versions, stored, missing, rebuilt)
            with bar("replay: sampling again"):
                summary, chat, context = await _sample_again(
                    config, policy, policy_trajectories, sources, images.files
                )

        replays |= summary

    player = _player(config, agent)
    for trajectory in over(chosen, "replay", len(chosen), "trajectories"):
        result = replays[trajectory.id]
        if reason := _why_not_replayable(config, trajectory.agent):
            result.unplayed = reason
        elif player is None or chat is None:
            result.unplayed = "its agent is a function, which was not passed"
        else:
            task = shown[trajectory.task_id]
            await _play(config, trajectory, task, player, chat, context, images, result)

        if trajectory.id in altered and result.difference is None:
            what = (
                "its tokens and turns are the same, but its row is not what was written "
                "(`agentevo audit` lists all such rows)"
            )
            result.note("record", len(trajectory.turns), what)

    return [replays[trajectory.id] for trajectory in chosen]


def _why_not_replayable(config: RunConfig, agent: str) -> str:
    """Why an attempt of one of several agents can't be played again. Empty if it can."""
    if config.tasks.self_play is not None:
        is_proposer = agent == PROPOSER
        return "its reward comes from the solver's attempts at its question" if is_proposer else ""
    if not agent:
        return ""
    other_agents = ", ".join(name for name in config.agents if name != agent) or "others"
    return f"its agent {agent} plays with {other_agents}, but a replay plays attempts of one agent"


async def _images_of(store: Store, trajectories: Sequence[Trajectory]) -> ImageCollector:
    """The images that the trajectories and their tasks name."""
    named = {digest for t in trajectories for digest in images_of_trajectory(t)}
    for t in trajectories:
        named |= set(images_of_task(await store.task(t.task_id)))

    images = ImageCollector()
    for digest in sorted(named):
        images.add(await store.image(digest))
    return images


async def _find_altered(store: Store, chosen: Sequence[Trajectory]) -> set[str]:
    """The ids of trajectories whose row was changed. A replay does not reproduce ids, messages,
    metrics and reasons of failures, so it can't detect such changes."""
    ids = {trajectory.id for trajectory in chosen}
    return {
        stored.trajectory.id
        for group in {trajectory.group_id for trajectory in chosen}
        async for stored in store.trajectories(group_id=group)
        if stored.trajectory.id in ids and not is_as_written(stored)
    }


async def _sources(
    versions: Sequence[int],
    stored: StoredVersions,
    missing: Collection[int],
    rebuilt: AsyncIterator[Source],
) -> AsyncIterator[tuple[int, Source]]:
    """Yields each version with its weights, which are valid until the next iteration. `rebuilt`
    yields the weights of the missing versions, in order."""
    for version in versions:
        yield version, await anext(rebuilt) if version in missing else stored.weights_of(version)


async def _sample(
    config: RunConfig, store: Store, count: int, *, made_again: bool
) -> list[Trajectory]:
    """Chooses trajectories with available weights. With `made_again`, chooses from all
    trajectories. Raises CheckpointError if no trajectory has all its weights."""
    names = [
        summary.id
        for summary in await store.summaries(split="train")
        if summary.num_completion_tokens
    ]
    random.Random(derive_seed(config.run.seed, "replay")).shuffle(names)
    policies = {weights_of(config, agent) for agent in (config.agents or [""])}
    stored = {policy: StoredVersions(config, policy) for policy in policies}
    chosen: list[Trajectory] = []
    for name in names:
        if len(chosen) == count:
            break

        try:
            trajectory = await store.trajectory(name)
        except StoreError:  # `store gc --dropped` has deleted its tokens
            continue

        stored_versions = stored[weights_of(config, trajectory.agent)]
        if made_again or all(map(stored_versions.has, versions_of(trajectory))):
            chosen.append(trajectory)

    if names and not chosen:
        raise CheckpointError(
            f"{config.run_dir} has weights for none of its {len(names)} trajectories: train with "
            "checkpoint.every=1 and a larger "
            "checkpoint.keep_last"
        )

    return chosen


def versions_of(trajectory: Trajectory) -> list[int]:
    return sorted({version for turn in trajectory.turns for version in turn.versions})


async def _sample_again(
    config: RunConfig,
    policy: str,
    trajectories: Sequence[Trajectory],
    sources: AsyncIterator[tuple[int, Source]],
    images: Mapping[str, ImageFile],
) -> tuple[dict[str, TrajectoryReplay], ChatFormat | None, int]:
    """Samples every token again (the first half), version after version. `images`: the files of
    the trajectories' images, by digest. Returns the results with
    the chat format and the context length of the models."""
    replays = {
        t.id: TrajectoryReplay(trajectory=t.id, versions=versions_of(t), reward=t.reward)
        for t in trajectories
    }
    chat = None
    context = 1 << 30
    section = config.sampling
    filters = SamplingParams(top_p=section.top_p, top_k=section.top_k, min_p=section.min_p)
    async for version, source in sources:
        loaded = load_version(config, source, version, policy)
        chat = chat_of(loaded) if chat is None else chat
        context = context_length(loaded.model.config)

        for trajectory in trajectories:
            result = replays[trajectory.id]
            if version not in result.versions:
                continue
            resampled = resample(trajectory, version, loaded, filters, images)
            result.tokens += resampled.num_tokens
            result.ties += resampled.num_ties
            result.keep_first(*resampled.differences)

    for result in replays.values():
        difference = result.difference
        if config.engine.type != OWN and difference and difference.kind in ("token", "logprob"):
            result.difference = None
            result.unsampled = (
                f"the engine {config.engine.type!r} recorded the run, and it does not draw by the "
                f"rule of the embedded engine (engine.type={OWN}), which a replay repeats"
            )

    return replays, chat, context


def _player(config: RunConfig, agent: AgentFunction | None) -> Agent | None:
    """The player of the run's agent. None if the agent is a function that was not passed."""
    has_agent = config.agent.type != "function" and (
        config.environment is not None or config.tasks.given or brings_tasks(config.agent.type)
    )
    return find_agent(config, agent) if agent is not None or has_agent else None


async def _play(
    config: RunConfig,
    trajectory: Trajectory,
    task: Task,
    player: Agent,
    chat: ChatFormat,
    context: int,
    images: ImageCollector,
    result: TrajectoryReplay,
) -> None:
    """Plays the task again (the second half). An error of the agent or agent.timeout_s ends the
    play. If the record did not end in the same way, that is a difference."""
    engine = RecordedEngine(trajectory, chat.end_ids)
    conversation_seed = derive_seed(config.run.seed, trajectory.id)
    conversation = Conversation(
        engine,
        chat,
        _sampling(config, trajectory, chat),
        name=trajectory.id,
        seed=conversation_seed,
        context_length=context,
        timeout_s=config.engine.timeout_s,
        images=images,
    )
    gateway = _NoGateway()

    models = RecordedModels(config.remote_models, trajectory.remote_turns)
    remote = None
    if models:
        remote = RemoteConversations(
            models, name=trajectory.id, seed=conversation_seed, images=conversation.images
        )

    policy = Policy(conversation, gateway, remote, texts=Texts(config.agent.texts))
    attempt = GroupAttempt(player, task, policy, name=trajectory.id, limit_s=config.agent.timeout_s)
    played = None
    # the engine gave no further answer: at a difference, or at the end of a record that was cut off
    with suppress(InfrastructureFailure):
        (played,) = await attempt.run(
            task_id=trajectory.task_id, group_id=trajectory.group_id, number=trajectory.attempt
        )
        scoring = Scoring(config.rewards)
        judged_again = not (
            scoring.compares(task) or scoring.asks_models(task) or scoring.asks_policy(task)
        )
        if judged_again:
            needs_reward = [bool(attempt.unrewarded)]
            (played,) = await scoring.score(
                [played], needs_reward, {}, task=task, images=conversation.images.files
            )
        # other rewards, a judge or the weights are not used again
        elif played.status == "completed":
            recorded = {name: getattr(trajectory, name) for name in ("reward", "success")}
            played = msgspec.structs.replace(played, **recorded)

    if gateway.was_needed:
        result.unplayed = "its agent uses the gateway, whose requests arrive in no fixed order"
    else:
        _compare(trajectory, played, engine, models, result)


class _NoGateway:
    """Replaces the gateway (agents/policy.py), and remembers whether the agent needs one."""

    was_needed = False

    def open(
        self,
        conversations: Mapping[str, Conversation],
        remote: RemoteConversations | None,
        remote_agents: Mapping[str, str],
    ) -> AttemptSession:
        self.was_needed = True
        raise EngineError("a replay has no gateway")

    def end(self, session: AttemptSession) -> None: ...


def _sampling(config: RunConfig, trajectory: Trajectory, chat: ChatFormat) -> SamplingParams:
    """The sampling parameters of the trajectory."""
    temperatures = (turn.temperature for turn in trajectory.turns if turn.overrides is None)
    temperature = next(temperatures, config.sampling.temperature)
    return sampling_params(config.sampling, chat, temperature)


def _compare(
    trajectory: Trajectory,
    played: Trajectory | None,
    engine: RecordedEngine,
    models: RecordedModels,
    result: TrajectoryReplay,
) -> None:
    """Notes in `result` the first difference between the repeated attempt and the record. `played`
    is None if the attempt failed."""
    result.turns = engine.num_answered
    result.remote_turns = models.num_answered
    result.keep_first(engine.difference, models.difference)

    if trajectory.status != "completed" or result.difference is not None or played is None:
        return

    last = len(trajectory.turns)
    if played.status != "completed":
        result.note("end", last, f"the agent failed: {played.error}")
        return

    result.replayed_reward = played.reward
    if engine.num_answered < last:
        what = f"the agent ended after {engine.num_answered} turns, the record has {last}"
        result.note("end", engine.num_answered, what)
    elif models.num_answered < len(trajectory.remote_turns):
        num_asked = models.num_answered
        num_recorded = len(trajectory.remote_turns)
        what = f"the agent asked remote models {num_asked} times, the record has {num_recorded}"
        result.note("end", last, what)
    else:
        _compare_rewards(trajectory, played, result)


def _compare_rewards(trajectory: Trajectory, played: Trajectory, result: TrajectoryReplay) -> None:
    earned = {turn.index: turn.reward for turn in played.turns}
    for turn in trajectory.turns:
        paid = earned.get(turn.index, 0.0)
        if abs(paid - turn.reward) > REWARD_TOLERANCE:
            what = f"turn {turn.index} earned {paid:g}, in the record {turn.reward:g}"
            result.note("reward", turn.index, what, len(turn.completion_ids))

    if (
        abs(played.reward - trajectory.reward) > REWARD_TOLERANCE
        or played.success != trajectory.success
        or played.truncated != trajectory.truncated
    ):
        what = (
            f"the reward is {played.reward:g} (success: {played.success}, truncated: "
            f"{played.truncated}), in the record {trajectory.reward:g} ({trajectory.success}, "
            f"{trajectory.truncated})"
        )
        result.note("reward", len(trajectory.turns), what)
