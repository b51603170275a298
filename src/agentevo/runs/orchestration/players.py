"""Creates and checks the agents and environments of a run before anything is written. This module
does not need torch, so samplers on machines without it use it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from agentevo.agents import AgentFunction, FunctionAgent, make_agent
from agentevo.agents.environment_agent import Demonstration, demonstrate, first_messages
from agentevo.agents.environment_thread import SoloEnvironment
from agentevo.agents.task_agent import asks_once, check_agent_names
from agentevo.config import EnvironmentAgentSection, RunConfig
from agentevo.config.algorithm_functions import check_names
from agentevo.config.judges import check_calibrated
from agentevo.data.message_images import inline_images
from agentevo.environments import TextEnvironment, make, mean_baselines
from agentevo.environments.observation import read_observation, text_of
from agentevo.environments.step_results import read_reset
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.inference.remote_models.model import check_keys
from agentevo.rewards.answer_texts import references
from agentevo.rollout.given_tasks import GivenTasks
from agentevo.rollout.scoring import Scoring
from agentevo.rollout.self_play import SelfPlayAgent, make_family
from agentevo.rollout.task_source import TaskSource
from agentevo.rollout.tasks import environment_seed
from agentevo.rollout.teachers import check_teachers
from agentevo.runs.orchestration.refusals import Refusals
from agentevo.runtime.console import to_stderr
from agentevo.runtime.progress import over
from agentevo.types import Baselines, Task

CORPUS_EPISODES = 64
"""The number of environments that the tiny policy's word tokenizer reads."""


def find_agent(config: RunConfig, function: AgentFunction | None) -> FunctionAgent:
    """The agent that attempts tasks: a program's function, or else the registered agent of the
    recipe."""
    if function is not None:
        agent = FunctionAgent(function)
    else:
        agent = make_agent(config.agent, lambda: make_environment(config))
    section = config.tasks.self_play
    return (
        agent
        if section is None
        else SelfPlayAgent(agent, make_family(section, config.agent.timeout_s))
    )


def check_named(config: RunConfig) -> None:
    """Raises ConfigError for names in a recipe that can't be resolved: its agent, question family
    or functions of its algorithm, or their options. Reads no tasks, and makes no environment and no
    model."""
    find_agent(config, None)
    check_names(config.algorithm)


def check_environment(config: RunConfig) -> None:
    """Raises ConfigError for an environment that can't be made."""
    with solo_environment(config):
        pass


def check_play(config: RunConfig, tasks: Sequence[Task] | None) -> GivenTasks | None:
    """Raises ConfigError, before anything is created, if tasks can't be attempted or scored: a
    missing package or wrong option of the environment, an agent that can't be made, files that
    can't be read, too few tasks, unknown rewards, or none. Returns the tasks that the recipe's
    files or its agent gave."""
    refusals = Refusals()
    if config.environment is not None and tasks is None:
        refusals.collect(check_environment, config)

    refusals.collect(check_keys, config.remote_models)
    source = refusals.collect(TaskSource, config, tasks)
    scoring = refusals.collect(Scoring, config.rewards, models=config.remote_models)
    if source is not None and scoring is not None:
        refusals.collect(_check_scoring, config, scoring, source.given())
        refusals.collect(_check_teachers, config, source.given_to_train())
    elif config.agent.type != "function":
        refusals.collect(find_agent, config, None)

    refusals.raise_all()
    return None if source is None else source.read


def _check_scoring(config: RunConfig, scoring: Scoring, tasks: Sequence[Task]) -> None:
    agent = None if config.agent.type == "function" else find_agent(config, None)
    check_agent_names(tasks, config.agent.type)
    needs_scorer = agent is not None and (agent.needs_scorer or any(map(asks_once, tasks)))
    scoring.check(tasks, needed=needs_scorer)
    check_calibrated(scoring.configs(tasks), config.remote_models)


def _check_teachers(config: RunConfig, tasks: Sequence[Task]) -> None:
    environment = config.environment
    if not tasks and environment is not None:  # all of its tasks have the same source
        tasks = [Task(id=environment.type, environment=environment.type)]
    check_teachers(tasks, config.distillation)


def make_environment(config: RunConfig) -> TextEnvironment:
    """A new environment, with the smaller of the limits on actions of environment and agent."""
    if config.environment is None:
        raise ConfigError("environment: this run has none: add environment.type=NAME")
    return make(config.environment.model_copy(update={"max_actions": config.max_actions}))


def solo_environment(config: RunConfig, note: Callable[[str], None] = to_stderr) -> SoloEnvironment:
    """A new environment outside of attempts. Raises ConfigError for one that can't be made."""
    return SoloEnvironment(
        lambda: make_environment(config), within_s=config.agent.timeout_s, note=note
    )


def reference_players(
    config: RunConfig, tasks: Sequence[Task], note: Callable[[str], None]
) -> Baselines | None:
    """Mean success of a random and an optimal player at an environment's tasks; None for tasks that
    belong to no environment, and, with a note, for an environment that can't give it."""
    if config.environment is None:
        return None

    seeds = [task.seed for task in tasks]
    try:
        with solo_environment(config, note) as solo:
            return solo.call(
                lambda environment: mean_baselines(environment.config, seeds, config.max_actions)
            )
    except (ConfigError, EnvironmentFailure) as error:
        note(f"the success of a random and an optimal player is unknown: {error}")
        return None


def check_solver(
    config: RunConfig, who_asks: str, *, may_fail: bool = False
) -> Demonstration | None:
    """An episode of the solver, or None if it may fail and does. Raises ConfigError if the
    environment has no solver. The error contains `who_asks`, which
    names the key that needs the solver and the remedy. `may_fail`: the caller leaves out episodes
    in which the environment fails, so a failure is not an error."""
    seed = environment_seed(config.run.seed, "demonstration", 0)
    with solo_environment(config) as solo:
        try:
            shown = solo.call(
                lambda environment: demonstrate(environment, seed, config.environment_agent, 0.0)
            )
        except EnvironmentFailure as error:
            if may_fail:
                return None
            raise ConfigError(
                f"environment {solo.name}: its solver fails ({error}), and {who_asks}"
            ) from error

    if shown is None:
        raise ConfigError(f"environment {solo.name} has no solver, which {who_asks}")

    return shown


def corpus_of(config: RunConfig) -> Iterable[str]:
    """Texts with every word of the environment's conversations, or of the tasks' queries and
    answers, for the word tokenizer."""
    if config.environment is None:
        source = TaskSource(config, None)
        proposed = source.proposals.of_step(1) if source.proposals is not None else []
        for task in (*source.given(), *proposed):
            yield from (task.query or "", *map(str, references(task.answer)))
        return

    agent = config.agent
    if not isinstance(
        agent, EnvironmentAgentSection
    ):  # such an agent adds its own words to the environment's
        agent = EnvironmentAgentSection()

    def episode(environment: TextEnvironment, seed: int) -> list[str]:
        lists_actions = type(environment).random_action is not TextEnvironment.random_action
        shown = demonstrate(environment, seed, agent, 0.5 if lists_actions else 0.0)
        seen = read_observation(read_reset(environment.reset(seed=seed)), "reset")
        opening = first_messages(environment, text_of(seen), agent)
        conversations = [opening] if shown is None else shown.conversations
        return [message.text for messages in conversations for message in messages]

    failures: list[EnvironmentFailure] = []
    with solo_environment(config) as solo:
        for index in range(CORPUS_EPISODES):
            seed = environment_seed(config.run.seed, "demonstration", index)
            try:
                yield from solo.call(partial(episode, seed=seed))
            except EnvironmentFailure as error:
                failures.append(error)

    if len(failures) == CORPUS_EPISODES:
        raise ConfigError(
            f"environment {solo.name}: all of {CORPUS_EPISODES} episodes for the words of the tiny "
            f"model failed, the first with: {failures[0]}"
        ) from failures[0]


def solver_episodes(
    config: RunConfig,
    episodes: int,
    random_action_rate: float,
    *,
    note: Callable[[str], None],
    remedy: str,
) -> Iterator[tuple[int, Demonstration]]:
    """Episodes that the environment's own solver plays, on seeds that nothing else uses, with their
    numbers. Episodes that the environment fails are left out and
    reported at the end. Raises ConfigError for an environment without a solver, with the remedy,
    and where all episodes fail."""
    failures: list[EnvironmentFailure] = []
    with solo_environment(config, note) as solo:
        for index in over(range(episodes), "demonstrations", episodes, "episodes"):
            seed = environment_seed(config.run.seed, "demonstration", CORPUS_EPISODES + index)
            play = partial(
                demonstrate,
                seed=seed,
                section=config.environment_agent,
                random_rate=random_action_rate,
            )
            try:
                shown = solo.call(play)
            except EnvironmentFailure as error:
                failures.append(error)
                continue

            if shown is None:
                raise ConfigError(f"environment {solo.name} has no solver to learn from: {remedy}")

            yield index, shown

    if failures:
        failed = f"{len(failures)} of {episodes} demonstrations failed, the first with: "
        if len(failures) == episodes:
            raise ConfigError(f"environment {solo.name}: {failed}{failures[0]}") from failures[0]
        note(f"warning: {failed}{failures[0]}")


def demonstration_rows(
    config: RunConfig, episodes: int, note: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The episodes that succeed, as rows for `agentevo sft`. Raises as `solver_episodes`."""
    played = solver_episodes(
        config,
        episodes,
        0.0,
        note=note,
        remedy="only an environment that knows the best action can demonstrate it",
    )
    for index, shown in played:
        if shown.success:
            for messages in shown.conversations:
                yield {
                    "id": f"demonstration-{index}",
                    "messages": [inline_images(message, shown.images) for message in messages],
                }
