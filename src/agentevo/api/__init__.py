"""The Python API: `agentevo.train` turns a program's objects into the same `RunConfig` as a recipe.

Options have the names and the checks of the YAML: a section is a mapping (`trainer={"steps": 5}`),
and `overrides` are the command line's `a.b=c`. Wrong ones raise `ConfigError` before anything is
created.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pydantic

from agentevo.config import RunConfig, build_config, config_keys, sources, to_tree
from agentevo.config.agents import agent_names, agents, takes_policy
from agentevo.config.imports import OF_YOUR_OWN, check_recipe_of_run, import_all
from agentevo.config.parallel import follows
from agentevo.config.preset_keys import changed_keys, drop_idle_keys, kept_keys
from agentevo.config.rewards import Reward, reward_entry
from agentevo.config.sources import plain_option
from agentevo.config.tools import Tool, tool_entry
from agentevo.environments import EnvironmentConfig, TextEnvironment, environments
from agentevo.errors import ConfigError, UnknownNameError, shown
from agentevo.inference.default_engine import engine_override
from agentevo.runs.folder.creation import check_folder
from agentevo.runs.folder.run_folder import run_config
from agentevo.runtime.console import to_stderr
from agentevo.runtime.extras import training_packages
from agentevo.runtime.registry import nearest
from agentevo.types import Task

if TYPE_CHECKING:
    from agentevo.api.run import Run
    from agentevo.observability import LiveView

AgentFunction: TypeAlias = Callable[..., Any]
"""`run(task, policy)` acts through the policy, `run(task)` through its own client; async or not.
It returns the reward, named parts of it, one for each turn, an `Outcome`, or None if `rewards`
decide."""


@dataclass(frozen=True)
class Command:
    """A program that makes one attempt per start."""

    words: list[str]


@dataclass(frozen=True)
class ToolUser:
    """The tool agent, with entries of `agent.tools`."""

    tools: list[Any]


Trainable: TypeAlias = (
    str
    | Command
    | ToolUser
    | Path
    | RunConfig
    | EnvironmentConfig
    | TextEnvironment
    | type[TextEnvironment]
    | AgentFunction
)
Option: TypeAlias = str | Path | Mapping[str, Any] | pydantic.BaseModel
Tasks: TypeAlias = Sequence[Task | Mapping[str, Any]] | str | Path | Mapping[str, Any]


def train(
    agent_or_env: Trainable | None = None,
    tasks: Tasks | None = None,
    *,
    command: Sequence[str] | None = None,
    tools: Sequence[Tool] = (),
    rewards: Sequence[Reward] = (),
    model: Option | None = None,
    algorithm: Option | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    view: LiveView | None = None,
    **sections: Option,
) -> Run:
    """Trains an agent and returns the finished run.

    `agent_or_env` is one of:

    - a recipe (name, path or `RunConfig`);
    - an environment (name, options, class or object);
    - a registered agent (name or class);
    - an agent function `run(task, policy)` or `run(task)`.

    Omit it to train a `command`, which is a program that makes one attempt per start, or to train
    the tool agent with `tools` (functions, classes, names, entries of `agent.tools`).

    Agents need `tasks`: a list, a file or dataset, or the section as a mapping. `rewards` are
    names, options, or functions `def reward(completion, task) -> float`. `model` and `algorithm`
    are names or complete sections; None keeps the recipe's value or the default. Every other
    section of the configuration is a keyword argument. Raises `ConfigError` for invalid input,
    before anything is created.
    """
    options, listed_tasks = add_tasks_and_rewards(sections, tasks, rewards)
    trained = _trainable_of(agent_or_env, command, tools)
    resolved = partial(
        resolve,
        trained,
        model=model,
        algorithm=algorithm,
        has_tasks=listed_tasks is not None,
        **options,
    )
    config, agent = resolved(overrides=overrides)
    if not resume and not follows():
        check_folder(config)  # before torch is imported, which takes seconds

    with training_packages("training"):
        from agentevo.api.run import train as train_run

    if engine_options := engine_override([config], resume=resume, note=to_stderr):
        config, agent = resolved(overrides=[*overrides, *engine_options])
    needs_tasks = agent if not config.tasks.given else None
    return train_run(
        config,
        agent=agent,
        tasks=checked_tasks(listed_tasks, needs_tasks),
        resume=resume,
        view=view,
    )


def _trainable_of(
    trainable: Trainable | None, command: Sequence[str] | None, tools: Sequence[Tool]
) -> Trainable:
    if (trainable is not None) + (command is not None) + bool(tools) != 1:
        raise ConfigError(
            "agentevo.train: give it what to train (a recipe, an environment, an agent), or "
            "command=[PROGRAM, ...], or tools=[...] for the tool agent, and only one of these"
        )

    if trainable is not None:
        return trainable
    if tools:
        return ToolUser([tool_entry(tool) for tool in tools])

    if isinstance(command, (str, bytes)) or not isinstance(command, Sequence):
        raise ConfigError(
            f"agentevo.train: command is {shown(command)}: give a list of words, such as "
            "['node', 'agent.js']"
        )

    return Command([str(word) for word in command])


def sft(
    recipe: str | Path | RunConfig | Mapping[str, Any],
    *,
    model: Option | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    view: LiveView | None = None,
    **sections: Option,
) -> Run:
    """Fine-tunes a model on conversations and returns the finished run.

    `recipe` is a name, a path, a `RunConfig` or a mapping of sections, such as
    `{"data": {"train": "chats.jsonl"}}`. The other arguments are those of `train`. Raises
    `ConfigError` for invalid input, before anything is created.
    """
    with training_packages("training"):
        from agentevo.api.run import sft as run_sft

    options = {
        key: plain_option(value, named=key == "model")
        for key, value in {**sections, "model": model}.items()
        if value is not None
    }
    tree, name = _recipe_tree(recipe)
    try:
        tree = sources.overlay(tree, options)
    except ConfigError as error:
        raise ConfigError(f"agentevo.sft: {error}") from error

    return run_sft(
        build_config(tree, overrides, where="agentevo.sft", name=name, needs_environment=False),
        resume=resume,
        view=view,
    )


def _recipe_tree(config: str | Path | RunConfig | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(configuration, name of the run)."""
    if isinstance(config, RunConfig):
        return to_tree(config), config.run.name
    if isinstance(config, Mapping):
        return {str(key): plain_option(value, named=False) for key, value in config.items()}, "sft"
    path = sources.find_recipe(str(config))
    tree = sources.read_yaml(path)
    check_recipe_of_run(path, tree)
    return tree, path.stem


def load_run(
    run_dir: str | Path,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task | Mapping[str, Any]] | None = None,
    rewards: Sequence[Reward] = (),
    overrides: Sequence[str] = (),
) -> Run:
    """Loads an existing run from its folder, together with the files that its configuration names
    (also under `import`). Pass an agent function, a list of tasks and reward functions again, and
    first register what your program registered. The run keeps the options of its rewards."""
    with training_packages("a run"):
        from agentevo.api.run import Run

    for reward in rewards:
        reward_entry(reward)

    config = run_config(Path(run_dir), overrides)
    needs_tasks = agent if not config.tasks.given else None
    return Run(config, agent=agent, tasks=checked_tasks(tasks, needs_tasks))


def add_tasks_and_rewards(
    sections: Mapping[str, Any], tasks: Tasks | None, rewards: Sequence[Reward]
) -> tuple[dict[str, Any], Sequence[Task | Mapping[str, Any]] | None]:
    """The sections with the files of tasks and the rewards that a program gives, and its list of
    tasks if it gives one."""
    options = dict(sections)
    listed_tasks = None
    if isinstance(tasks, (str, Path)):
        options["tasks"] = {"train": str(tasks)}
    elif isinstance(tasks, Mapping):
        options["tasks"] = tasks
    else:
        listed_tasks = tasks

    if rewards:
        options["rewards"] = [reward_entry(reward) for reward in rewards]

    return options, listed_tasks


def resolve(
    agent_or_env: Trainable,
    *,
    model: Option | None = None,
    algorithm: Option | None = None,
    overrides: Sequence[str] = (),
    has_tasks: bool = False,
    **sections: Any,
) -> tuple[RunConfig, AgentFunction | None]:
    """The checked configuration of `train`, and the agent function, if any. `has_tasks`: whether a
    list of tasks is also given."""
    named = {"model": model, "algorithm": algorithm}
    options = {
        key: plain_option(value, named=key in named)
        for key, value in {**sections, **named}.items()
        if value is not None
    }
    folder = None
    if isinstance(agent_or_env, (str, Path)) and Path(agent_or_env).suffix in {".yaml", ".yml"}:
        folder = Path(agent_or_env).parent  # where its imports and files are
    else:  # the name may be one that the import registers
        import_all(options, overrides, where="agentevo.train", folder=Path.cwd())

    base_tree, name, agent = _starting_point(agent_or_env)
    try:
        tree = sources.overlay(base_tree, options)
    except ConfigError as error:
        raise ConfigError(f"agentevo.train: {error}") from error

    drop_idle_keys(base_tree, tree, changed_keys(options.items()))
    config = build_config(
        tree,
        overrides,
        where="agentevo.train",
        folder=folder,
        name=name,
        needs_environment=agent is None and not has_tasks,
    )
    is_text = config_keys().is_text
    kept = kept_keys(base_tree, overrides, where=name, is_text=is_text, options=options)
    if kept:
        warnings.warn("\n".join(kept), stacklevel=3)

    return config, agent


def _starting_point(trainable: Trainable) -> tuple[dict[str, Any], str, AgentFunction | None]:
    """(configuration so far, name of the run, agent function)."""
    if isinstance(trainable, (str, Path)):
        return _find_recipe_or_environment(str(trainable))
    if isinstance(trainable, RunConfig):
        return to_tree(trainable), trainable.run.name, None
    if isinstance(trainable, Command):
        return {"agent": {"type": "command", "command": trainable.words}}, "command", None
    if isinstance(trainable, ToolUser):
        return {"agent": {"type": "tool_agent", "tools": trainable.tools}}, "tool_agent", None

    if isinstance(trainable, EnvironmentConfig):
        options = plain_option(trainable, named=False)
        return {"environment": options}, str(options.get("type")), None

    if isinstance(trainable, TextEnvironment):
        kind = _register_environment(type(trainable))
        return (
            {"environment": {**trainable.config.model_dump(mode="json"), "type": kind}},
            kind,
            None,
        )

    if inspect.isclass(trainable) and issubclass(trainable, TextEnvironment):
        kind = _register_environment(trainable)
        return {"environment": {"type": kind}}, kind, None

    if inspect.isclass(trainable):
        registered = agents.name_of(trainable)
        if registered is None:
            raise ConfigError(
                f"agentevo.train: {trainable.__name__} is not registered: put "
                f'@agentevo.agent("{trainable.__name__.lower()}") before the class of an agent'
            )
        return {"agent": {"type": registered}}, registered, None

    if callable(trainable):
        try:
            takes_policy(trainable)
        except ConfigError as error:
            raise ConfigError(f"agentevo.train: {error}") from error
        name = str(getattr(trainable, "__name__", type(trainable).__name__)).strip("<>")
        return {"agent": {"type": "function"}}, name, trainable

    raise ConfigError(
        f"agentevo.train: can't train a {type(trainable).__name__}: "
        "give a recipe, an environment (name, options, class), a registered agent (name, class), "
        "or an agent function"
    )


def _find_recipe_or_environment(name: str) -> tuple[dict[str, Any], str, None]:
    """A recipe has tested settings, so it comes before an environment of the same name."""
    recipes = sources.recipe_names()
    environment_names = environments.names()
    if name in recipes or Path(name).suffix in {".yaml", ".yml"}:
        path = sources.find_recipe(name)
        tree = sources.read_yaml(path)
        check_recipe_of_run(path, tree)
        return tree, path.stem, None

    if name in environment_names:
        return {"environment": {"type": name}}, name, None
    if name in agent_names():
        return {"agent": {"type": name}}, name, None

    guess = nearest(name, [*recipes, *environment_names, *agent_names()])
    hint = f"did you mean {guess!r}? " if guess else ""
    raise UnknownNameError(
        f"agentevo.train: {name!r} is no recipe, no environment and no agent: {hint}recipes: "
        f"{', '.join(recipes)}; environments: {', '.join(environment_names)}; agents: "
        f"{', '.join(agent_names())}{OF_YOUR_OWN}"
    )


def _register_environment(environment: type[TextEnvironment]) -> str:
    """Registers a user's environment under its `type`, so that recipes and run folders can name it.
    Returns the type."""
    options = getattr(environment, "Config", None)
    kind = (
        options.model_fields["type"].default
        if options is not None and "type" in options.model_fields
        else None
    )
    if not isinstance(kind, str):
        raise ConfigError(
            f"agentevo.train: {environment.__name__} needs a `Config` (an EnvironmentConfig) "
            "with a name for recipes: "
            f'`type: Literal["{environment.__name__.lower()}"] = "{environment.__name__.lower()}"`'
        )

    try:
        environments.register(kind)(environment)
    except ValueError as error:
        raise ConfigError(
            f"agentevo.train: {error}: give {environment.__name__}.Config another `type`"
        ) from error

    return kind


def checked_tasks(
    tasks: Sequence[Task | Mapping[str, Any]] | None, agent: AgentFunction | None
) -> list[Task] | None:
    """Tasks as records; a mapping is read like a row of a file. Raises `ConfigError` for an agent
    function without tasks, a mapping that is not a task, and a repeated id."""
    from agentevo.rollout import given_tasks

    if not tasks:
        if agent is not None or tasks is not None:
            example = "tasks=[agentevo.Task(id='1', query='2+2?', answer='4')]"
            raise ConfigError(
                f"agentevo.train: no tasks: an agent function needs them, for example {example}"
            )
        return None

    checked = given_tasks.checked_tasks(tasks, "agentevo.train: tasks")
    given_tasks.check_unique(checked, "agentevo.train: tasks")
    return checked
