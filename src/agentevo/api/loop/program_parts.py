"""The parts that stay with a program when its model is on a server: its rewards, the remote models
that it calls, with their keys, and the agents that those play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from agentevo.config.remote_models import RemoteModelSection, name_problems
from agentevo.config.rewards import Reward, read_rewards, reward_entry
from agentevo.config.sources import plain_option
from agentevo.errors import ConfigError
from agentevo.inference.remote_models import RemoteModels
from agentevo.rewards import RewardConfig
from agentevo.runtime.console import to_stderr


@dataclass(frozen=True)
class ProgramParts:
    """See the module."""

    rewards: tuple[RewardConfig, ...]
    remote_models: RemoteModels
    remote_agents: dict[str, str]
    """The agents that a remote model plays, and which."""
    agents: dict[str, Any]
    """All other sections, as the server reads them."""

    @classmethod
    def read(
        cls,
        rewards: Sequence[Reward],
        remote_models: Mapping[str, Any],
        agents: Mapping[str, Any],
    ) -> ProgramParts:
        """Separates the parts from the sections of a recipe. Raises ConfigError with a line for
        each problem."""
        configs, problems = read_rewards([reward_entry(reward) for reward in rewards])
        sections: dict[str, RemoteModelSection] = {}
        for name, declared in remote_models.items():
            try:
                options = plain_option(declared, named=False)
                sections[name] = RemoteModelSection.model_validate(options)
            except pydantic.ValidationError as error:
                problems += [
                    f"remote_models.{name}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
                    for wrong in error.errors()
                ]

        problems += name_problems(list(remote_models), "policy")
        problems += [
            f"remote_models.{name}.cache: answers are kept in a run's folder, which is on the "
            "server: leave it out"
            for name, section in sections.items()
            if section.cache
        ]
        plain = {name: plain_option(agent, named=False) for name, agent in agents.items()}
        problems += [
            f"agents: {name!r} is also the name of a remote model, so clients could not "
            f"distinguish them: rename one of them"
            for name, config in plain.items()
            if name in remote_models and not (_is_remote(config) and config["remote"] == name)
        ]
        played = {name: config["remote"] for name, config in plain.items() if _is_remote(config)}
        problems += [
            f"agents.{name}.remote: {model!r} is not in remote_models "
            f"({', '.join(remote_models) or 'none'})"
            for name, model in played.items()
            if model not in remote_models
        ]
        problems += [
            f"agents.{name}.remote: a remote model's agent has no other keys"
            for name in played
            if len(plain[name]) > 1
        ]
        if problems:
            raise ConfigError("\n".join(f"Client.open_model: {line}" for line in problems))

        own_agents = {name: config for name, config in plain.items() if name not in played}
        return cls(configs, RemoteModels(sections), played, own_agents)

    def close(self) -> None:
        """Ends the remote models, and returns a report of their cost."""
        for line in self.remote_models.account():
            to_stderr(line)
        self.remote_models.close()


def _is_remote(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("remote") is not None
