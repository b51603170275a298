"""What is refused before a run creates or deletes anything."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agentevo.config import ModelSection, RunConfig
from agentevo.config.algorithm_functions import check_names
from agentevo.config.parallel import world_size
from agentevo.errors import ConfigError, TrainingError, UnusableCheckpointError
from agentevo.inference.engines import check_engine
from agentevo.inference.secret import RunSecret
from agentevo.inference.transports import check_transport
from agentevo.models.adapters import check_lora
from agentevo.models.chat import ChatFormat
from agentevo.models.load import LoadedModel, check_overrides, load_hollow
from agentevo.models.resolve import TINY, locate, resolve, saved_folder
from agentevo.models.weight_files import check_saved_model
from agentevo.orchestration.components import AgentFunction, check_memory, load_policy
from agentevo.orchestration.conversations import check_sft_data
from agentevo.orchestration.device_plan import plan_of
from agentevo.orchestration.players import (
    check_play,
    check_solver,
    find_agent,
    solo_environment,
)
from agentevo.orchestration.preference_data import check_preference
from agentevo.orchestration.profiling import check_profile
from agentevo.orchestration.tracking import check_tracking
from agentevo.tracing import check_tracing
from agentevo.training.algorithm_functions import try_out
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.spread import check_spread
from agentevo.types import Task


def check_recipe(
    config: RunConfig,
    command: Literal["train", "sft"],
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    may_fetch: bool = True,
) -> None:
    """All that a run of `agentevo train` or `sft` refuses of its recipe before it looks at its
    folder. Raises ConfigError or ModelError. `may_fetch`: as `check_parts` has it."""
    check_agent(config, agent, tasks)
    check_tracing(config)
    if command == "sft":
        check_sft_parts(config, resume, may_fetch=may_fetch)
    else:
        check_parts(config, tasks, resume, may_fetch=may_fetch)


def check_parts(
    config: RunConfig,
    tasks: Sequence[Task] | None,
    resume: bool,
    *,
    apart: bool = False,
    may_fetch: bool = True,
) -> None:
    """Raises ConfigError or ModelError for what would otherwise fail while a training run's parts
    are built: an unknown engine or transport, a missing package or option of engine, environment or
    child processes, too few tasks, a model that can't be had. `apart`: samplers and engines are
    other processes, whoever starts them. `may_fetch`: a known model is downloaded here; else
    nothing is, and a model that is not on this machine is looked at by its name alone."""
    if config.rollout.samplers:
        importlib.import_module("agentevo.inference.server")  # raises MissingExtraError
        plan_of(config)
        RunSecret(config.run_dir / "engines", config.rollout.engine_secret).check()

    check_processes(config)
    check_tracking(config)
    check_play(config, tasks)
    check_engine(config.engine)
    apart = apart or config.rollout.samplers > 0
    check_transport(config, apart=apart)
    check_preference(config)
    if config.cold_start.episodes and not resume:
        check_solver(config, "cold_start.episodes asks: set cold_start.episodes=0", may_fail=True)
    if config.trainer.optimizer_from is not None and not resume:
        _check_optimizer(config.trainer.optimizer_from)

    check_names(config.algorithm)
    try_out(config.algorithm)

    check_memory(config)
    check_profile(config)
    if not resume:
        for section in _policies(config):
            _check_model(section, may_fetch)

    for name in _models_beside(config):
        (resolve if may_fetch else locate)(name)


def _check_optimizer(folder: Path) -> None:
    try:
        Checkpoints.run_state(folder)
    except UnusableCheckpointError as error:
        raise ConfigError(
            f"trainer.optimizer_from: {error.__cause__}: give the folder of a checkpoint, such as "
            "runs/NAME/checkpoints/step-000010"
        ) from error


def models_to_fetch(config: RunConfig) -> list[str]:
    """A line for every model that a run downloads before it loads it. Raises ModelError."""
    names = [section.name for section in _policies(config) if section.name != TINY]
    return [
        f"the model {name} is not on this machine: a run downloads it first"
        for name in dict.fromkeys([*names, *_models_beside(config)])
        if saved_folder(name) is None
    ]


def check_weights(config: RunConfig) -> list[str]:
    """Refuses damaged files of the models that are on this machine, which a run loads; no weight is
    read into memory. Returns a line for each whose digests were too much to compare. Raises
    ModelError and TornError."""
    names = [section.name for section in _policies(config) if section.name != TINY]
    folders = {name: saved_folder(name) for name in (*names, *_models_beside(config))}
    adapters = (section.lora.adapter for section in _policies(config))
    folders |= {str(folder): folder for folder in adapters if folder is not None}

    lines = (
        check_saved_model(f"model {name!r}", folder)
        for name, folder in folders.items()
        if folder is not None
    )
    return [line for line in lines if line]


def _policies(config: RunConfig) -> list[ModelSection]:
    own_models = (agent.model for agent in config.agents.values())
    return [config.model, *filter(None, own_models)]


def _models_beside(config: RunConfig) -> list[str]:
    return [*filter(None, (config.reward_model.name, config.algorithm.reference_model))]


def _check_model(section: ModelSection, may_fetch: bool) -> None:
    if section.name != TINY:
        source = resolve(section.name) if may_fetch else saved_folder(section.name)
        check_overrides(section, source)
        check_lora(section.lora)


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
    _check_spread(config, loaded)
    return loaded


def check_unloaded(config: RunConfig) -> LoadedModel | None:
    """What `load_checked`, and the sampler after it, would refuse of the recipe's model, where that
    is on this machine; no weight of a saved one is read. Returns it as far as it was read, None of
    one that is not here. Raises ConfigError and ModelError."""
    if config.model.name == TINY:
        loaded = load_checked(config)
    else:
        folder = saved_folder(config.model.name)
        if folder is None:
            return None
        loaded = load_hollow(config.model, folder)
        _check_spread(config, loaded)

    ChatFormat(loaded.tokenizer, getattr(loaded.model, "generation_config", None))
    return loaded


def _check_spread(config: RunConfig, loaded: LoadedModel) -> None:
    try:
        check_spread(loaded.model, config.trainer.parallel)
    except TrainingError as error:
        raise ConfigError(str(error)) from error


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


def check_sft_parts(config: RunConfig, resume: bool, *, may_fetch: bool = True) -> None:
    """As `check_parts`, for `agentevo sft`, whose environment is optional."""
    check_processes(config)
    check_tracking(config)
    check_sft_data(config)
    check_memory(config)
    check_profile(config)

    if config.environment is not None:
        with solo_environment(config):
            pass

    if not resume:
        _check_model(config.model, may_fetch)
