"""Environments of the package `verifiers`: its tasks, its rollout, its rubric.

    agentevo.train(world("gsm8k", num_train_examples=500), model=...)   # by name, with options
    agentevo.train(world(environment), model=...)                       # an object

In a recipe: `import: [agentevo.integrations.verifiers]`, `agent: {type: verifiers, id: gsm8k}`. The
environment calls the policy through the gateway, with its own client, in its own event loop:
blocking code there does not delay the tokens of other attempts. Both generations are supported:
environments with `load_environment` (verifiers 0.1.14 to 0.3, classic.py), and tasksets with an
`Env` (0.4, tasksets.py). The package is imported only when an environment is played.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field, JsonValue

from agentevo.agents import Policy
from agentevo.config import AgentSection
from agentevo.config.agents import agent
from agentevo.errors import ConfigError
from agentevo.integrations.verifiers.loading import VerifiersWorld, load, wrap
from agentevo.types import Outcome, Task

__all__ = ["VerifiersAgent", "VerifiersSection", "world"]


class VerifiersSection(AgentSection):
    """Options of the agent: which environment of the package `verifiers`."""

    type: str = "verifiers"
    id: str = Field(min_length=1)
    """Name of an installed environment, as for `vf-eval`, such as gsm8k or owner/gsm8k."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Options: those of its `load_environment`, or of verifiers 0.4's section `env`."""
    max_tasks: int = Field(default=10_000, ge=2)
    """Use only the first N training tasks, and the first N held-out tasks."""


_loaded: dict[str, VerifiersWorld] = {}
"""Environments of this process by their options. A loaded one supplies tasks and plays them."""


@agent("verifiers")
class VerifiersAgent:
    """An agent whose attempts an environment of verifiers plays."""

    Config = VerifiersSection
    brings_tasks = True

    def __init__(self, config: VerifiersSection) -> None:
        key = json.dumps([config.id, config.args, config.max_tasks], sort_keys=True)
        if key not in _loaded:
            _loaded[key] = load(config.id, config.args, config.max_tasks)
        self._world = _loaded[key]

    def tasks(self) -> tuple[list[Task], list[Task]]:
        """The environment's training and held-out tasks."""
        return self._world.tasks()

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Plays one attempt; the rubric gives the reward. Raises the environment's errors."""
        return await self._world.play(task, policy)


def world(
    environment: Any, *, name: str | None = None, max_tasks: int = 10_000, **args: Any
) -> type:
    """An agent for `agentevo.train`, which brings its tasks: an environment by its name, with the
    options `args`, or an object, which is registered under `name` (default: its own).

    Raises ConfigError for an object that is no environment."""
    if isinstance(environment, str):
        loaded = load(environment, args, max_tasks)
    elif args:
        raise ConfigError(
            f"world: {', '.join(args)}: options are for an environment by its name; this one is "
            "made already"
        )
    else:
        loaded = wrap(environment, max_tasks)

    return _register_agent(loaded, name or re.sub(r"[^\w.-]+", "_", loaded.name))


def _register_agent(verifiers_world: VerifiersWorld, name: str) -> type:
    class PlayedWorld:
        """One environment at hand."""

        brings_tasks = True

        def __init__(self, config: AgentSection) -> None:
            pass

        def tasks(self) -> tuple[list[Task], list[Task]]:
            return verifiers_world.tasks()

        async def run(self, task: Task, policy: Policy) -> Outcome:
            return await verifiers_world.play(task, policy)

    return agent(name)(PlayedWorld)
