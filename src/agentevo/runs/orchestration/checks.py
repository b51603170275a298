"""Checks that refuse a run before it creates or deletes anything."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agentevo.config import ModelSection, RunConfig
from agentevo.config.agents import AgentSection, CodeAgentSection, ToolAgentSection
from agentevo.config.algorithm_functions import check_names
from agentevo.config.parallel import follows, world_size
from agentevo.errors import ConfigError, TrainingError, UnusableCheckpointError
from agentevo.inference.engines import check_engine, check_model
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.weights.transports import check_transport
from agentevo.models.chat.answer_form import problem_of_calls
from agentevo.models.chat.chat_format import chat_of
from agentevo.models.compute.adapters import check_lora
from agentevo.models.files.load import LoadedModel, check_overrides, load_hollow
from agentevo.models.files.resolve import TINY, locate, resolve, saved_folder
from agentevo.models.files.weight_files import check_saved_model
from agentevo.observability import LiveView
from agentevo.observability.tracing import check_tracing
from agentevo.rollout.attempt_images import check_sees
from agentevo.rollout.given_tasks import GivenTasks
from agentevo.runs.folder.chain import is_given_up
from agentevo.runs.folder.creation import check_place
from agentevo.runs.orchestration.components import AgentFunction, check_memory, load_policy
from agentevo.runs.orchestration.conversations import check_sft_data, read_sft_data
from agentevo.runs.orchestration.players import (
    check_environment,
    check_play,
    check_solver,
    find_agent,
)
from agentevo.runs.orchestration.preference_data import check_preference
from agentevo.runs.orchestration.profiling import check_profile
from agentevo.runs.orchestration.refusals import Refusals
from agentevo.runs.orchestration.supervisor import plan_of
from agentevo.runs.orchestration.teachers import check_tokenizers
from agentevo.runs.orchestration.tracking import check_tracking
from agentevo.runtime.paths import spelling_hint
from agentevo.training.algorithm_functions import try_out
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.distribute import check_spread
from agentevo.types import Task


def check_recipe(
    config: RunConfig,
    command: Literal["train", "sft"],
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    may_fetch: bool = True,
) -> GivenTasks | None:
    """Checks the recipe of `agentevo train` or `sft` before the run looks at its folder, and raises
    all problems in one ConfigError. Returns the given tasks and downloads models as `check_parts`
    does."""
    refusals = Refusals()
    refusals.collect(check_agent, config, agent, tasks)
    refusals.collect(check_tracing, config)

    given_tasks = None
    if command == "sft":
        refusals.collect(check_sft_parts, config, resume, may_fetch=may_fetch)
    else:
        given_tasks = refusals.collect(check_parts, config, tasks, resume, may_fetch=may_fetch)

    refusals.raise_all()
    return given_tasks


def check_parts(
    config: RunConfig,
    tasks: Sequence[Task] | None,
    resume: bool,
    *,
    is_disaggregated: bool = False,
    may_fetch: bool = True,
) -> GivenTasks | None:
    """Raises ConfigError with all problems that would otherwise appear while a training run builds
    its parts: an unknown engine or transport, a missing package or option of engine, environment or
    child processes, too few tasks, an unavailable model. Returns the tasks of the recipe's files or
    of its agent. `is_disaggregated`: samplers and engines are other processes, regardless of the
    program that starts them. `may_fetch`: models that are not on this machine are downloaded if
    there is no other problem. If false, only their names are checked."""
    refusals = Refusals()
    if config.rollout.samplers:
        refusals.collect(_check_samplers, config)

    refusals.collect(check_processes, config)
    refusals.collect(check_tracking, config)
    given_tasks = refusals.collect(check_play, config, tasks)
    refusals.collect(
        _check_serving, config, is_disaggregated=is_disaggregated or config.rollout.samplers > 0
    )
    refusals.collect(check_preference, config)
    if config.cold_start.episodes and not resume:
        reason = "cold_start.episodes asks: set cold_start.episodes=0"
        refusals.collect(check_solver, config, reason, may_fail=True)
    if config.trainer.optimizer_from is not None and not resume:
        refusals.collect(_check_optimizer, config.trainer.optimizer_from)

    refusals.collect(_check_algorithm, config)
    refusals.collect(check_memory, config)
    refusals.collect(check_profile, config)
    policies = [] if resume else _policies(config)
    _check_models(policies, _other_models(config), may_fetch, refusals)
    return given_tasks


def check_sft_parts(config: RunConfig, resume: bool, *, may_fetch: bool = True) -> None:
    """Checks the parts of `agentevo sft`, as `check_parts` does for training. The environment is
    optional."""
    refusals = Refusals()
    for check in (check_processes, check_tracking, check_sft_data, check_memory, check_profile):
        refusals.collect(check, config)

    if config.environment is not None:
        refusals.collect(check_environment, config)
    _check_models([] if resume else [config.model], [], may_fetch, refusals)


def _check_models(
    policies: Sequence[ModelSection],
    others: Sequence[str],
    may_fetch: bool,
    refusals: Refusals,
) -> None:
    """Checks the models. Raises ConfigError for all `refusals`, before any download and at the
    end."""
    if may_fetch:
        refusals.raise_all()

    for section in policies:
        refusals.collect(_check_model, section, may_fetch)
    for name in others:
        refusals.collect(resolve if may_fetch else locate, name)

    refusals.raise_all()


def _check_samplers(config: RunConfig) -> None:
    importlib.import_module("agentevo.inference.serving.server")  # raises MissingExtraError
    plan_of(config)
    RunSecret(config.run_dir / "engines", config.rollout.engine_secret).check()


def _check_serving(config: RunConfig, *, is_disaggregated: bool) -> None:
    check_engine(config.engine)
    check_transport(config, is_separate=is_disaggregated)


def _check_algorithm(config: RunConfig) -> None:
    check_names(config.algorithm)
    try_out(config.algorithm)


def _check_optimizer(folder: Path) -> None:
    try:
        Checkpoints.run_state(folder)
    except UnusableCheckpointError as error:
        raise ConfigError(
            f"trainer.optimizer_from: {error.__cause__}: give the folder of a checkpoint, such as "
            "runs/NAME/checkpoints/step-000010"
        ) from error


def check_dry(
    config: RunConfig, command: Literal["train", "sft"] = "train", *, resume: bool = False
) -> list[str]:
    """Does the checks of `train` before it samples, and raises all problems in one ConfigError,
    without reading the weights of a saved model. Downloads and writes nothing. Returns the lines of
    `startup_notes`, and a line for each model whose weights were too large to compare with their
    digests. Raises ModelError and TornError too."""
    refusals = Refusals()
    given_tasks = refusals.collect(check_recipe, config, command, resume=resume, may_fetch=False)
    if follows():
        refusals.raise_all()
        return []

    goes_on = resume and not is_given_up(config.run_dir)
    lines: list[str] = []
    refusals.collect(check_place, config, command, resume=goes_on, may_create=False)
    if not goes_on:
        lines = refusals.collect(check_weights, config) or []
        loaded = refusals.collect(check_unloaded, config)
        if command == "train" and loaded is not None:
            refusals.collect(check_model, config.engine, loaded.model)
        if command == "train" and loaded is not None and len(_policies(config)) == 1:
            images = {} if given_tasks is None else given_tasks.images
            refusals.collect(check_sees, config, images, [chat_of(loaded)])
        if command == "sft" and loaded is not None:
            view = LiveView(config.run.name)
            refusals.collect(read_sft_data, config, loaded, view, lambda: False)

    refusals.raise_all()
    return startup_notes(config, given_tasks) + lines


def startup_notes(config: RunConfig, given_tasks: GivenTasks | None) -> list[str]:
    """A line for every model that the run downloads, and the reports about the rows of task files.
    Raises ModelError."""
    names = [section.name for section in _policies(config) if section.name != TINY]
    lines = [
        f"the model {name} is not on this machine: "
        f"{spelling_hint(Path(name))}a run downloads it first"
        for name in dict.fromkeys([*names, *_other_models(config)])
        if saved_folder(name) is None
    ]
    reports = () if given_tasks is None else given_tasks.reports
    return lines + [line for report in reports for line in report.lines()]


def check_weights(config: RunConfig) -> list[str]:
    """Checks the files of the run's models that are on this machine, without loading weights.
    Returns a line for each model that is too large to compare with its digests. Raises ModelError
    and TornError for damaged files."""
    names = [section.name for section in _policies(config) if section.name != TINY]
    folders = {name: saved_folder(name) for name in (*names, *_other_models(config))}
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


def _other_models(config: RunConfig) -> list[str]:
    return [*filter(None, (config.reward_model.name, config.algorithm.reference_model))]


def _check_model(section: ModelSection, may_fetch: bool) -> None:
    if section.name != TINY:
        source = resolve(section.name) if may_fetch else saved_folder(section.name)
        check_overrides(section, source)
        check_lora(section.lora)


def check_processes(config: RunConfig, *, world: int | None = None) -> None:
    """Raises ConfigError if trainer.parallel does not fit the number of processes (`world`, or as
    many as a launcher has started), or if several processes can't train the recipe together."""
    world = world if world is not None else world_size()
    try:
        config.trainer.parallel.replicas(world)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    single_process = {
        "several policies (agents)": len(config.agents) > 0,
        "a profile (profile)": config.profile.enabled,
    }
    for feature in [name for name, is_used in single_process.items() if is_used and world > 1]:
        raise ConfigError(
            f"{feature}: {world} processes can't train on that together: "
            "start one, without torchrun"
        )


def needs_no_whole_model(config: RunConfig, *, is_disaggregated: bool) -> bool:
    """Whether no process of a training needs the whole model, because each holds a part of it and
    engines in other processes serve (`is_disaggregated`)."""
    return is_disaggregated and config.trainer.parallel.is_spread and not config.data.given


def load_checked(
    config: RunConfig, checkpoint: Path | None = None, *, for_part: bool = False
) -> LoadedModel:
    """Loads the recipe's policy (`load_policy`) and checks it. Raises ConfigError, before anything
    is created, for a model that can't be split as trainer.parallel says."""
    loaded = load_policy(config, checkpoint, for_part=for_part)
    _check_spread(config, loaded)
    check_tokenizers(config, loaded.tokenizer)
    if _system_remedy(config.agent):
        _check_template(config, loaded)
    return loaded


def check_unloaded(config: RunConfig) -> LoadedModel | None:
    """Checks the recipe's model as `load_checked` and the sampler do, without loading the weights
    of a saved model. Returns the model (a saved one without weights), or None if it is not on this
    machine. Raises ConfigError and ModelError."""
    if config.model.name == TINY:
        loaded = load_checked(config)
    else:
        folder = saved_folder(config.model.name)
        if folder is None:
            return None
        loaded = load_hollow(config.model, folder)
        _check_spread(config, loaded)
        check_tokenizers(config, loaded.tokenizer)

    _check_template(config, loaded)
    return loaded


def _check_template(config: RunConfig, loaded: LoadedModel) -> None:
    """Raises ModelError for a chat template in which no episode can continue, and ConfigError if
    the agent has a system message that the template does not accept, or requires calls in a
    notation that sampling can't be constrained to."""
    chat = chat_of(loaded)
    remedy = _system_remedy(config.agent)
    if remedy and chat.system_problem is not None:
        raise ConfigError(f"model {loaded.name!r}: {chat.system_problem}: {remedy}")

    if isinstance(config.agent, ToolAgentSection) and config.agent.required_calls:
        problem = problem_of_calls(chat)
        if problem is not None:
            raise ConfigError(
                f"agent.required_calls with model {loaded.name!r}: {problem}; or leave the key out"
            )


def _system_remedy(agent: AgentSection) -> str:
    """The advice that avoids the system message of the recipe's agent; empty if the agent has
    none."""
    if isinstance(agent, CodeAgentSection):
        return f"agent.type={agent.type} always has one: choose another model or agent"
    if getattr(agent, "system_prompt", None) is None:
        return ""
    return "set agent.system_prompt=null" + (
        " and agent.instruction" if hasattr(agent, "instruction") else ""
    )


def _check_spread(config: RunConfig, loaded: LoadedModel) -> None:
    try:
        check_spread(loaded.model, config.trainer.parallel)
    except TrainingError as error:
        raise ConfigError(str(error)) from error


def check_agent(
    config: RunConfig, agent: AgentFunction | None, tasks: Sequence[Task] | None
) -> None:
    """Raises ConfigError for an agent function without tasks, for a missing agent, and for an agent
    function or given tasks if samplers run in other processes."""
    if agent is not None and tasks is None and not config.tasks.given:
        raise ConfigError("an agent function needs tasks: pass tasks=[...]")

    find_agent(config, agent)
    if (tasks is not None or config.agent.type == "function") and config.rollout.samplers:
        raise ConfigError(
            "an agent function and given tasks live in this process: set rollout.samplers=0, or "
            "put the agent into a file (@agentevo.agent(NAME), key import) and the tasks into "
            "another (key tasks)"
        )
