"""AgentEvo trains decision-making language-model agents: any agent in, a better model out.

    import agentevo
    run = agentevo.train("coins", model="smollm2-135m-instruct", trainer={"steps": 20})
    print(run.summary, run.checkpoint)

Invariant: importing this package imports no room of it; each name below loads what it needs when it
is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentevo.api import load_run, sft, train
    from agentevo.config.agents import AgentSection, agent
    from agentevo.environments.environment import EnvironmentConfig, TextEnvironment, environment
    from agentevo.errors import AgentEvoError, ConfigError
    from agentevo.types import Message, Outcome, Task

__version__ = "0.1.0"
_HOMES = {
    "AgentEvoError": "agentevo.errors",
    "AgentSection": "agentevo.config.agents",
    "ConfigError": "agentevo.errors",
    "EnvironmentConfig": "agentevo.environments.environment",
    "Message": "agentevo.types",
    "Outcome": "agentevo.types",
    "Task": "agentevo.types",
    "TextEnvironment": "agentevo.environments.environment",
    "agent": "agentevo.config.agents",
    "environment": "agentevo.environments.environment",
    "load_run": "agentevo.api",
    "sft": "agentevo.api",
    "train": "agentevo.api",
}
__all__ = [
    "AgentEvoError",
    "AgentSection",
    "ConfigError",
    "EnvironmentConfig",
    "Message",
    "Outcome",
    "Task",
    "TextEnvironment",
    "__version__",
    "agent",
    "environment",
    "load_run",
    "sft",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentevo' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
