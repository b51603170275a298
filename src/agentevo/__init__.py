"""AgentEvo trains decision-making language-model agents: any agent in, a better model out.

    import agentevo
    run = agentevo.train("coins", model="smollm2-135m-instruct", trainer={"steps": 20})
    print(run.summary, run.checkpoint)

Invariant: importing this package imports none of its subpackages. The first use of a name imports
its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentevo.agents.capture import untracked
    from agentevo.agents.named_texts import examples, text
    from agentevo.agents.tools.tool import ToolResult
    from agentevo.api import load_run, sft, train
    from agentevo.api.evaluation import evaluate
    from agentevo.api.loop.client import Client
    from agentevo.api.loop.group import Group
    from agentevo.api.loop.local import open_model
    from agentevo.api.loop.rollout import gather, rollout
    from agentevo.config.agents import AgentSection, agent
    from agentevo.config.algorithm_functions import advantage, credit, policy_loss
    from agentevo.config.self_play import question_family
    from agentevo.config.tools import tool
    from agentevo.environments.environment import EnvironmentConfig, TextEnvironment, environment
    from agentevo.environments.episode import ActionResult, EpisodicEnvironment
    from agentevo.environments.observation import Observation
    from agentevo.errors import AgentEvoError, ConfigError, ToolError
    from agentevo.rewards.reward import RewardConfig, Score, Unscored, register_scorer, reward
    from agentevo.rollout.self_play import Question
    from agentevo.types import Message, Outcome, Task
    from agentevo_evolve.optimizing import optimize

__version__ = "0.1.0"
_MODULE_OF_NAME = {
    "ActionResult": "agentevo.environments.episode",
    "AgentEvoError": "agentevo.errors",
    "AgentSection": "agentevo.config.agents",
    "Client": "agentevo.api.loop.client",
    "ConfigError": "agentevo.errors",
    "EnvironmentConfig": "agentevo.environments.environment",
    "EpisodicEnvironment": "agentevo.environments.episode",
    "Group": "agentevo.api.loop.group",
    "Message": "agentevo.types",
    "Observation": "agentevo.environments.observation",
    "Outcome": "agentevo.types",
    "Question": "agentevo.rollout.self_play",
    "RewardConfig": "agentevo.rewards.reward",
    "Score": "agentevo.rewards.reward",
    "Task": "agentevo.types",
    "TextEnvironment": "agentevo.environments.environment",
    "ToolError": "agentevo.errors",
    "ToolResult": "agentevo.agents.tools.tool",
    "Unscored": "agentevo.rewards.reward",
    "advantage": "agentevo.config.algorithm_functions",
    "agent": "agentevo.config.agents",
    "credit": "agentevo.config.algorithm_functions",
    "environment": "agentevo.environments.environment",
    "evaluate": "agentevo.api.evaluation",
    "examples": "agentevo.agents.named_texts",
    "gather": "agentevo.api.loop.rollout",
    "load_run": "agentevo.api",
    "open_model": "agentevo.api.loop.local",
    "optimize": "agentevo_evolve.optimizing",
    "policy_loss": "agentevo.config.algorithm_functions",
    "question_family": "agentevo.config.self_play",
    "register_scorer": "agentevo.rewards.reward",
    "reward": "agentevo.rewards.reward",
    "rollout": "agentevo.rollout",
    "sft": "agentevo.api",
    "text": "agentevo.agents.named_texts",
    "tool": "agentevo.config.tools",
    "train": "agentevo.api",
    "untracked": "agentevo.agents.capture",
}
__all__ = [
    "ActionResult",
    "AgentEvoError",
    "AgentSection",
    "Client",
    "ConfigError",
    "EnvironmentConfig",
    "EpisodicEnvironment",
    "Group",
    "Message",
    "Observation",
    "Outcome",
    "Question",
    "RewardConfig",
    "Score",
    "Task",
    "TextEnvironment",
    "ToolError",
    "ToolResult",
    "Unscored",
    "__version__",
    "advantage",
    "agent",
    "credit",
    "environment",
    "evaluate",
    "examples",
    "gather",
    "load_run",
    "open_model",
    "optimize",
    "policy_loss",
    "question_family",
    "register_scorer",
    "reward",
    "rollout",
    "sft",
    "text",
    "tool",
    "train",
    "untracked",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'agentevo' has no attribute {name!r}")
    if name == "rollout":  # the package itself can be called
        return import_module("agentevo.rollout")
    value = getattr(import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
