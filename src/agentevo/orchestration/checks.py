"""What is refused before a run creates or deletes anything."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.config.credit import find_credit
from agentevo.config.parallel import world_size
from agentevo.errors import ConfigError, TrainingError
from agentevo.inference.engines import check_engine
from agentevo.inference.transports import check_transport
from agentevo.models.adapters import check_lora
from agentevo.models.load import LoadedModel, check_overrides
from agentevo.models.resolve import resolve
from agentevo.orchestration.components import AgentFunction, check_memory, load_policy
from agentevo.orchestration.conversations import check_sft_data
from agentevo.orchestration.players import check_play, find_agent, solo_environment
from agentevo.orchestration.preference_data import check_preference
from agentevo.orchestration.profiling import check_profile
from agentevo.orchestration.tracking import check_tracking
from agentevo.training.spread import check_spread
from agentevo.types import Task


def check_parts(
    config: RunConfig, tasks: Sequence[Task] | None, resume: bool, *, apart: bool = False
) -> None:
    """Raises ConfigError or ModelError for what would otherwise fail while a training run's parts
    are built: an unknown engine or transport, a missing package or option of engine, environment or
    child processes, too few tasks, a model that can't be had (a known one is downloaded here).
    `apart`: samplers and engines are other processes, whoever starts them."""
    if config.rollout.samplers:
        importlib.import_module("agentevo.inference.server")  # raises MissingExtraError

    check_processes(config)
    check_tracking(config)
    check_play(config, tasks)
    check_engine(config.engine)
    apart = apart or config.rollout.samplers > 0
    check_transport(config, apart=apart)
    check_preference(config)

    if config.algorithm.credit is not None:
        find_credit(config.algorithm.credit)

    check_memory(config)
    check_profile(config)
    if config.model.name != "tiny" and not resume:
        check_overrides(config.model, resolve(config.model.name))
        check_lora(config.model.lora)

    if config.reward_model.name is not None:
        resolve(config.reward_model.name)


def check_processes(config: RunConfig, *, world: int | None = None) -> None:
    """Raises ConfigError where trainer.parallel asks for other numbers of processes than a
    launcher has started (or `world`), and for what several processes can't train together."""
    world = world if world is not None else world_size()
    try:
        config.trainer.parallel.replicas(world)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    several = {
        "several policies (agents)": len(config.agents) > 0,
        "a profile (profile)": config.profile.enabled,
    }
    for what in [what for what, is_asked in several.items() if is_asked and world > 1]:
        raise ConfigError(
            f"{what}: {world} processes can't train on that together: start one, without torchrun"
        )


def serves_elsewhere(config: RunConfig, *, apart: bool) -> bool:
    """Whether the first of several processes needs no whole model: what it trains lies in parts on
    them, and engines in other processes serve (`apart`)."""
    return apart and config.trainer.parallel.is_spread and not config.data.given


def load_checked(
    config: RunConfig, checkpoint: Path | None = None, *, for_part: bool = False
) -> LoadedModel:
    """`load_policy`. Raises ConfigError, before anything is created, for a model that these
    processes can't share as trainer.parallel says."""
    loaded = load_policy(config, checkpoint, for_part=for_part)
    try:
        check_spread(loaded.model, config.trainer.parallel)
    except TrainingError as error:
        raise ConfigError(str(error)) from error
    return loaded


def check_agent(
    config: RunConfig, agent: AgentFunction | None, tasks: Sequence[Task] | None
) -> None:
    """Raises ConfigError for an agent function without tasks, no agent at all, and what samplers in
    other processes could not have."""
    if agent is not None and tasks is None and not config.tasks.given:
        raise ConfigError("an agent function needs tasks: pass tasks=[...]")

    find_agent(config, agent)
    if (tasks is not None or config.agent.type == "function") and config.rollout.samplers:
        raise ConfigError(
            "an agent function and given tasks live in this process: set rollout.samplers=0, or "
            "put the agent into a file (@agentevo.agent(NAME), key import) and the tasks into "
            "another (key tasks)"
        )


def check_sft_parts(config: RunConfig, resume: bool) -> None:
    """The same for `agentevo sft`, whose environment is optional."""
    check_processes(config)
    check_tracking(config)
    check_sft_data(config)
    check_memory(config)
    check_profile(config)

    if config.environment is not None:
        with solo_environment(config):
            pass

    if config.model.name != "tiny" and not resume:
        check_overrides(config.model, resolve(config.model.name))
