"""`agentevo.optimize`: better texts for a program's agent, as `agentevo optimize` finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentevo.api import (
    Option,
    Tasks,
    Trainable,
    add_tasks_and_rewards,
    checked_tasks,
    resolve,
)
from agentevo.config.rewards import Reward
from agentevo.runtime.extras import training_packages


def optimize(
    agent_or_env: Trainable,
    tasks: Tasks | None = None,
    *,
    out: str | Path,
    checkpoint: str | Path = "",
    rewards: Sequence[Reward] = (),
    model: Option | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    note: Callable[[str], None] = lambda line: None,
    **sections: Option,
) -> dict[str, Any]:
    """Searches for better texts and returns the contents of `summary.json`. The folder `out`
    receives the results, including `texts.yaml`.

    `checkpoint` is a folder of weights that replace the model's. The section `optimize` sets the
    search, such as `optimize={"attempts": 400}`. `note` receives the command's messages. The other
    arguments are those of `agentevo.train`.

    Raises `ConfigError` for invalid input, before anything is created. Raises
    `AttemptsFailedError` if no attempt with the agent's default texts completes.
    """
    with training_packages("a search for texts"):
        from agentevo.runs.evaluation.contestants import Contestant
        from agentevo_evolve.prompts.optimize import TextOptimization
        from agentevo_evolve.prompts.optimize import optimize as searched

    options, listed_tasks = add_tasks_and_rewards(sections, tasks, rewards)
    config, agent = resolve(
        agent_or_env,
        model=model,
        overrides=overrides,
        has_tasks=listed_tasks is not None,
        **options,
    )
    needs_tasks = agent if not config.tasks.given else None
    contestant = Contestant(config.run.name, config, Path(checkpoint) if checkpoint else None)
    what = TextOptimization(
        contestant=contestant,
        out=Path(out),
        resume=resume,
        agent=agent,
        tasks=checked_tasks(listed_tasks, needs_tasks),
    )
    return searched(what, note)
