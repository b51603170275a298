"""What a chosen advantage can't be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentevo.catalogue.advantages import ADVANTAGES
from agentevo.catalogue.presets import PRESETS

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


def advantage_contradictions(config: RunConfig) -> list[str]:
    """Contradictions of the chosen advantage with sections that it does not use and with rewards
    that it can't take."""
    needs = config.algorithm.needs
    problems = []
    for key, section, need in (
        ("critic", config.critic, "values"),
        ("process_reward", config.process_reward, "process_rewards"),
    ):
        if need not in needs and section != type(section)():
            problems.append(
                f"{key} is set, but algorithm.name={config.algorithm.name} has none: remove it, "
                f"or choose {_users(need)}"
            )

    if "values" in needs and 0 < config.trainer.steps <= config.critic.pretrain_steps:
        problems.append(
            f"critic.pretrain_steps={config.critic.pretrain_steps} leaves none of "
            f"trainer.steps={config.trainer.steps} to the policy: "
            "raise trainer.steps or lower critic.pretrain_steps"
        )

    by_mean = "maxrl" in (config.algorithm.advantage, config.algorithm.name)
    penalty = getattr(config.agent, "format_penalty", 0.0) if config.environment else 0.0
    if by_mean and penalty > 0:
        problems.append(
            "algorithm.advantage=maxrl divides by the mean reward, so no reward may be below 0, "
            f"but agent.format_penalty is {penalty:g}: set it to 0"
        )

    return problems


def _users(need: str) -> str:
    """The presets whose advantage needs this input."""
    return " or ".join(
        name for name, preset in PRESETS.items() if need in ADVANTAGES[preset.advantage].needs
    )
