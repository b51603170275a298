"""Episodes that the environment's own solver plays, on seeds that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from agentevo.agents.environment_agent import Demonstration, demonstrate
from agentevo.config import RunConfig
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.rollout.tasks import environment_seed
from agentevo.runs.orchestration.players import CORPUS_EPISODES, solo_environment
from agentevo.runtime.progress import over


def solver_episodes(
    config: RunConfig,
    episodes: int,
    random_action_rate: float,
    *,
    note: Callable[[str], None],
    remedy: str,
) -> Iterator[tuple[int, Demonstration]]:
    """The episodes with their numbers. Episodes that the environment fails are left out and
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
                    "messages": [msgspec.to_builtins(message) for message in messages],
                }
