"""The section `agents`: the agents of one rollout by name, and the weights that each plays with.

    agents:
      solver: {}                             # trained: the recipe's model
      critic: {train: false}                 # the same model, as it is before training
      writer: {model: {name: ./other}}       # trained as well, a model of its own
      twin:   {weights_of: solver}           # the solver's weights, which learn by it as well
      rival:  {weights_of: solver, lag: 5}   # the solver of five steps ago
      judge:  {remote: teacher}              # a remote model (section remote_models)

A *policy* is a set of weights. It has the name of the agent to which it belongs. Every agent except
a remote one plays with a policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from agentevo.config.model import ModelSection
from agentevo.errors import ConfigError
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Names become part of ids, metric names and folder names."""

_ONE_POLICY = ("code_agent", "environment", "single_turn", "tool_agent")
"""Built-in agents, which use one policy."""

_OTHER_WORDS = ("frozen", "freeze", "trained", "trainable")
"""Other systems' names for `train` or its opposite."""


class NamedAgentSection(Section):
    """One of several agents in a rollout, `policy["NAME"]`."""

    train: bool | None = None
    """Whether the agent's replies are trained on. Default: true, or false if version, lag or remote
    is set."""
    model: ModelSection | None = None
    """A separate model for this agent. Default: the recipe's model, with separate adapters or a
    separate copy."""
    weights_of: str | None = None
    """The agent whose weights this agent plays with (self-play). It uses the newest weights unless
    version or lag is set."""
    version: int | None = Field(default=None, ge=0)
    """Self-play against one version: the weights after this number of steps. Before that step, the
    newest weights."""
    lag: int | None = Field(default=None, ge=1)
    """Self-play against the weights from this many steps ago."""

    remote: str | None = None
    """The remote model (a name in remote_models) that plays this agent. It is never trained."""

    @model_validator(mode="before")
    @classmethod
    def _says_train(cls, value: Any) -> Any:
        """Refuses the names that other systems use for `train`, and names ours in the error."""
        synonym = next(
            (key for key in _OTHER_WORDS if isinstance(value, Mapping) and key in value), ""
        )
        if synonym:
            raise ValueError(
                f"`{synonym}` is not a key of an agent: write `train: false` for an agent whose "
                "weights stay fixed, and `train: true` for one that learns"
            )

        return value

    @property
    def is_earlier(self) -> bool:
        """Whether the agent plays with earlier weights of another agent."""
        return self.version is not None or self.lag is not None

    @property
    def is_trained(self) -> bool:
        is_fixed = self.is_earlier or self.remote is not None
        return not is_fixed if self.train is None else self.train

    def version_at(self, step: int) -> int:
        """The version with which the agent plays when `step` is the newest."""
        if self.version is not None:
            return min(self.version, step)
        return max(0, step - (self.lag or 0))


def policy_of(config: RunConfig, agent: str) -> str:
    """The policy that an agent plays with; empty in a run without named agents."""
    section = config.agents.get(agent)
    if section is None or section.weights_of is None or section.is_earlier:
        return agent
    return section.weights_of


def trained_agents(config: RunConfig) -> tuple[str, ...]:
    """The agents whose answers are trained on, in the recipe's order; the first is the main one."""
    return tuple(name for name, section in config.agents.items() if section.is_trained)


def weights_of(config: RunConfig, agent: str) -> str:
    """The policy whose current or earlier weights an agent plays with."""
    section = config.agents.get(agent)
    return agent if section is None or section.weights_of is None else section.weights_of


def with_model_of(config: RunConfig, policy: str) -> RunConfig:
    """The recipe with one policy's model instead of the main policy's."""
    section = config.agents.get(policy)
    if section is None or section.model is None:
        return config
    return config.model_copy(update={"model": section.model})


def by_rank(config: RunConfig) -> tuple[str, ...]:
    """All agents except the remote ones, the trained ones first."""
    trained = trained_agents(config)
    remote = remote_agents(config)
    return (
        *trained,
        *(name for name in config.agents if name not in trained and name not in remote),
    )


def remote_agents(config: RunConfig) -> dict[str, str]:
    """The agents that a remote model plays, with that model."""
    return {name: agent.remote for name, agent in config.agents.items() if agent.remote is not None}


def version_of(config: RunConfig, agent: str, version: int) -> int | None:
    """The version of its weights that an agent plays with when the trained weights are at
    `version`. None if its weights never change."""
    section = config.agents.get(agent)
    if section is not None and section.is_earlier:
        return section.version_at(version)
    return version if policy_of(config, agent) in (trained_policies(config) or ("",)) else None


def check_one_policy(config: RunConfig) -> None:
    """Raises ConfigError for named agents in a run whose samplers or engines are separate
    processes."""
    if config.agents:
        raise ConfigError(
            "agents: the engines of a run in several processes serve one policy: train several "
            "agents in one process, with `agentevo train` (rollout.staleness may be above 0), or "
            "by a program's own loop, here or through `agentevo serve --training`"
        )


def trained_policies(config: RunConfig) -> tuple[str, ...]:
    """The policies that are trained; the first is that of the recipe's `model`."""
    return tuple(dict.fromkeys(policy_of(config, name) for name in trained_agents(config)))


def named_agent_contradictions(config: RunConfig) -> list[str]:
    """Problems of named agents, and keys that a run with them does not support, as 'what:
    remedy'."""
    if not config.agents:
        return []

    problems = [
        f"agents: {name!r} is not a valid name: start with a letter, then use letters, digits, _ "
        "and -, at most 64"
        for name in config.agents
        if not _NAME.fullmatch(name)
    ]
    problems += [
        f"agents: {name!r} is also the name of a remote model, and clients could not choose "
        "between the two: rename one of them"
        for name, section in config.agents.items()
        if name in config.remote_models and section.remote != name
    ]
    problems += [
        f"agents.{name}{problem}"
        for name, section in config.agents.items()
        for problem in _of_one(config, section)
    ]
    if not trained_agents(config):
        problems.append(
            f"agents: none of {', '.join(config.agents)} is trained: set train: true for at least "
            "one"
        )
    elif not problems and config.agents[trained_policies(config)[0]].model is not None:
        main = trained_policies(config)[0]
        problems.append(
            f"agents.{main}.model: the first trained agent uses the recipe's model: set model "
            "instead"
        )

    return [*problems, *_of_the_run(config)]


def _of_one(config: RunConfig, section: NamedAgentSection) -> Iterator[str]:
    """Problems of one agent. Each line begins with the key below the agent's name."""
    owner = section.weights_of
    target = None if owner is None else config.agents.get(owner)

    if section.is_earlier and owner is None:
        yield ": version and lag choose among another agent's weights: add weights_of=NAME"
    if section.version is not None and section.lag is not None:
        yield ": version and lag both choose the weights: remove one of them"
    if section.is_earlier and section.train:
        yield ".train: earlier weights are not trained: remove train, or version and lag"

    if section.remote is not None and section.remote not in config.remote_models:
        model_names = ", ".join(config.remote_models) or "none"
        yield f".remote: {section.remote!r} is not in remote_models ({model_names})"

    settings = (section.train, section.model, section.weights_of, section.version, section.lag)
    if section.remote is not None and any(settings):
        yield ".remote: an agent that a remote model plays has no other keys: remove them"
    if owner is not None and section.model is not None:
        yield f".model: weights_of says that it uses the weights of {owner}: remove one of the two"

    if owner is not None and (target is None or target.weights_of is not None):
        owners = [name for name, agent in config.agents.items() if agent.weights_of is None]
        yield f".weights_of: {owner!r} does not have its own weights: choose one of {owners}"
    elif target is not None and not target.is_trained and (section.is_earlier or section.train):
        yield f".weights_of: {owner} is not trained, so it has no earlier or newer weights"


def _of_the_run(config: RunConfig) -> Iterator[str]:
    """Keys that work with one policy only."""
    algorithm = config.algorithm
    refused = {
        f"agent.type={config.agent.type}": config.agent.type in _ONE_POLICY
        and config.tasks.self_play is None,
        "rollout.samplers": config.rollout.samplers > 0,
        "cold_start.episodes": config.cold_start.episodes > 0,
        "data": config.data.given,
        "reward_model.name": config.reward_model.name is not None,
        "algorithm.dynamic_sampling": algorithm.dynamic_sampling > 1,
        "algorithm.keep_groups": algorithm.keep_groups < 1,
        "algorithm.rlpr_beta": algorithm.rlpr_beta is not None,
        "algorithm.replay_successes": algorithm.replay_successes > 0,
        f"algorithm.name={algorithm.name}": algorithm.preference() is not None
        or "baseline_rewards" in algorithm.needs,
    }
    for key, is_set in refused.items():
        if is_set:
            yield f"{key}: not supported in a run with named agents: remove it, or agents"
