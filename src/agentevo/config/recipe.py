"""`RunConfig`: the whole configuration of a run as one tree.

A YAML recipe fills it, dotted `a.b=c` overrides change it, and the result is frozen. Every default
is a tested setting. It is documented once, under its field, and `agentevo config KEY`
prints that text. Importing this module imports no torch.

Order of work: YAML -> the user's modules (`imports`) -> overrides -> unknown keys (refused, with
the nearest valid key) -> types -> contradictions. All of it happens before anything is created.
`sources` reads; `keys` explains keys and problems.

`environment` and `agent` are read by the model that is registered for their `type`, so those of
other packages and of user code (`import`) get the same checks as ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast

import pydantic
from pydantic import Field, PrivateAttr, SerializeAsAny, model_validator
from pydantic_core import ErrorDetails

from agentevo.algorithms.presets import PRESETS
from agentevo.config import sources
from agentevo.config.agents import (
    AgentSection,
    EnvironmentAgentSection,
    agent_names,
    agent_section,
)
from agentevo.config.algorithm import AlgorithmSection, with_importance
from agentevo.config.contradictions import divides_by_mean_reward, recipe_contradictions
from agentevo.config.distillation import DistillationSection
from agentevo.config.field_words import describe_wrong_choice
from agentevo.config.gateway import GatewaySection
from agentevo.config.imports import OF_YOUR_OWN, check_recipe_of_run, import_all
from agentevo.config.interpolation import escape_tree
from agentevo.config.keys import ConfigKeys, Variants, refused_values
from agentevo.config.memory import MemorySection
from agentevo.config.model import ModelSection
from agentevo.config.named_agents import NamedAgentSection
from agentevo.config.optimize import OptimizeSection
from agentevo.config.preset_keys import changed_keys, drop_idle_keys
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.rewards import read_rewards
from agentevo.config.rollout import RolloutSection
from agentevo.config.routing import with_recording
from agentevo.config.sections import (
    CheckpointSection,
    ColdStartSection,
    CriticSection,
    DataSection,
    EngineSection,
    EvaluationSection,
    ProcessRewardSection,
    ProfileSection,
    RewardModelSection,
    RunSection,
    SamplingSection,
    StoreSection,
    TrainerSection,
)
from agentevo.config.self_play import with_roles
from agentevo.config.sft import RMSection, SFTSection
from agentevo.config.tasks import TasksSection, names_tasks, play_problems
from agentevo.config.texts import with_texts_of_file
from agentevo.config.tool_entries import KINDS, read_tools
from agentevo.config.tracking import TrackingSection, tracker_models
from agentevo.environments import EnvironmentConfig, environments
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.tracing.section import TracingSection
from agentevo.rewards import RewardConfig, rewards
from agentevo.rewards.reward import reward_config
from agentevo.runtime.credentials import credential_problems
from agentevo.runtime.parsing import dump_yaml
from agentevo.runtime.section import Section


class RunConfig(Section):
    """Everything about one run."""

    model_config = pydantic.ConfigDict(serialize_by_alias=True)

    imports: tuple[str, ...] = Field(default=(), alias="import")
    """Your own modules and Python files, such as [./my_agent.py]. Files are searched next to the
    recipe, then in the current folder. The recipe can name the agents, environments and rewards
    that they register."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: SerializeAsAny[EnvironmentConfig] | None = None
    """The environment, chosen by `type` (`agentevo list environments`), with its difficulty
    options. A recipe must have one; only a run of an agent function on given tasks (Python API) has
    none."""
    tasks: TasksSection = TasksSection()
    """Tasks from files or datasets instead of an environment. Off if train is empty."""
    agent: SerializeAsAny[AgentSection] = EnvironmentAgentSection()
    """The agent, chosen by `type` (`agentevo list agents`), with its options. Default:
    `environment`, or `single_turn` if the recipe has tasks."""
    agents: dict[str, NamedAgentSection] = Field(default_factory=dict)
    """Several agents in one rollout, by name, such as {solver: {}, critic: {train: false}}. The
    recipe's agent calls one as `policy["solver"]`, a client as `model: solver`. Each has train,
    model, weights_of, version and lag (docs/multi_agent.md). Empty: one policy."""
    rewards: tuple[SerializeAsAny[RewardConfig], ...] = ()
    """The rewards of an attempt (`agentevo list rewards`), each a name or a mapping such as {name:
    format, pattern: ..., weight: 0.1}. Their weighted sum replaces the agent's own reward, and the
    first one decides what counts as success."""
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    gateway: GatewaySection = GatewaySection()
    remote_models: dict[str, RemoteModelSection] = Field(default_factory=dict)
    """Models behind HTTP APIs, each under the name by which agents and clients call it: teachers,
    judges, frozen agents. They are never trained."""
    trainer: TrainerSection = TrainerSection()
    memory: MemorySection = MemorySection()
    critic: CriticSection = CriticSection()
    process_reward: ProcessRewardSection = ProcessRewardSection()
    reward_model: RewardModelSection = RewardModelSection()
    distillation: DistillationSection = DistillationSection()
    data: DataSection = DataSection()
    sft: SFTSection = SFTSection()
    rm: RMSection = RMSection()
    optimize: OptimizeSection = OptimizeSection()
    cold_start: ColdStartSection = ColdStartSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    store: StoreSection = StoreSection()
    tracking: TrackingSection = TrackingSection()
    tracing: TracingSection = TracingSection()
    profile: ProfileSection = ProfileSection()

    _started_in: Path = PrivateAttr(default_factory=lambda: Path().absolute())

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, tree: Any) -> Any:
        return with_roles(with_recording(with_importance(tree)))

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        for problem in recipe_contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def run_dir(self) -> Path:
        """Absolute, since an agent can change the current folder of the process."""
        named = self.run.dir if self.run.dir is not None else Path("runs") / self.run.name
        return self._started_in / named

    @property
    def store_url(self) -> str:
        url = self.store.url or f"sqlite:///{self.run_dir / 'store.sqlite'}"
        return _absolute_url(url, self._started_in)

    @property
    def max_actions(self) -> int:
        """The number of actions that one episode can take: the smaller of the environment's limit
        and the agent's."""
        per_turn = getattr(self.agent, "actions_per_turn", 1)
        by_agent = self.agent.max_turns * per_turn
        return by_agent if self.environment is None else min(self.environment.max_actions, by_agent)

    @property
    def credit_rule(self) -> str:
        """What determines the value of each turn, in words for logs and records."""
        rules = (self.algorithm.credit_rule, self.distillation.rule)
        return "; ".join(filter(None, rules[self.distillation.is_alone :]))

    @property
    def environment_agent(self) -> EnvironmentAgentSection:
        """The section of the environment agent. Raises ConfigError for another agent: an
        environment's solver can demonstrate only the environment agent's conversations."""
        if not isinstance(self.agent, EnvironmentAgentSection):
            raise ConfigError(
                f"agent.type: {self.agent.type} has no demonstrations of an environment's solver: "
                "set agent.type=environment, or remove the keys that need them (cold_start, "
                "data.demonstrations, algorithm.pairs)"
            )
        return self.agent

    @property
    def length_max(self) -> int:
        """Number of trained tokens at which an attempt counts as too long."""
        return self.algorithm.length_max or self.sampling.max_new_tokens * self.agent.max_turns


def _absolute_url(url: str, folder: Path) -> str:
    path = url.removeprefix("sqlite:///")
    is_relative = path != url and not path.startswith(("/", "~", "${"))
    return f"sqlite:///{folder / path}" if is_relative else url


def load_config(
    recipe: str | Path, overrides: Sequence[str] = (), *, needs_environment: bool = True
) -> RunConfig:
    """Reads a recipe, applies `a.b=c` overrides, checks everything. Raises `ConfigError` with one
    line per problem."""
    path = sources.find_recipe(str(recipe))
    tree = sources.read_yaml(path)
    check_recipe_of_run(path, tree, overrides)
    return build_config(
        tree,
        overrides,
        where=str(path),
        folder=path.parent,
        name=path.stem,
        needs_environment=needs_environment,
    )


def build_config(
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "config",
    folder: Path | None = None,
    name: str = "run",
    needs_environment: bool = True,
) -> RunConfig:
    """Does what `load_config` does, from a mapping. Each problem line begins with `where`. `folder`
    is the folder of relative imports (default: the current one). `name` is the default of
    `run.name`."""
    imports = import_all(tree, overrides, where=where, folder=folder or Path.cwd())
    keys = config_keys()
    plain = sources.merge(tree, overrides, where=where, is_text=keys.is_text)
    sources.refuse(credential_problems(plain), overrides, where, tree)

    if plain.pop("sweep", None) is not None:
        raise ConfigError(
            f"{sources.written_in('sweep:', overrides, where)}: sweep: this recipe is several "
            "runs, which only `agentevo train` accepts (--dry-run lists them): add sweep=null to "
            "run the recipe without its variants"
        )

    plain["import"] = imports
    override_values = sources.overridden(overrides, keys.is_text)
    drop_idle_keys(tree, plain, changed_keys(override_values.items()))
    lines = _fill_in(plain, name, folder or Path.cwd())
    variants = section_variants()
    chosen = {
        section: str(plain[section]["type"])
        for section, models in variants.items()
        if isinstance(plain.get(section), dict) and plain[section].get("type") in list(models)
    }
    values = refused_values(plain, keys, chosen=chosen)
    refused = {line.partition(":")[0] for line in values}

    lines += values
    lines += play_problems(plain, needs_environment, environments.names())
    errors: list[ErrorDetails] = []
    for section, models in variants.items():
        if isinstance(plain.get(section), dict):
            read, wrong, refusal = _read_variant(section, plain.pop(section), models)
            plain |= {section: read} if read is not None else {}
            errors += wrong
            lines += [refusal] if refusal else []

    try:
        config = RunConfig.model_validate(plain)
    except pydantic.ValidationError as error:
        errors.extend(error.errors())

    problems = [keys.problem(error, chosen=chosen) for error in errors]
    lines.extend(line for line in problems if line.partition(":")[0] not in refused)
    sources.refuse(lines, overrides, where, tree)
    return config


def _fill_in(plain: dict[str, Any], name: str, folder: Path) -> list[str]:
    """Expands the short forms of rewards and tasks, and sets the defaults that depend on other
    keys. Returns the problems of the rewards and tools."""
    run = plain.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)

    plain["rewards"], lines = read_rewards(plain.get("rewards") or [])
    plain["tasks"] = sources.with_absolute_paths(plain.get("tasks", {}), ("train", "eval"), folder)
    for key in ("data", "rm"):
        plain[key] = sources.with_absolute_paths(
            plain.get(key, {}), ("train", "eval", "pairs"), folder
        )

    has_tasks = names_tasks(plain["tasks"]) and plain.get("environment") is None
    agent = plain.setdefault("agent", {})
    if isinstance(agent, dict):
        agent.setdefault("type", "single_turn" if has_tasks else "environment")
        if agent["type"] == "environment" and divides_by_mean_reward(plain.get("algorithm")):
            agent.setdefault("format_penalty", 0.0)
        agent, problem = with_texts_of_file(agent, folder)
        plain["agent"] = agent
        lines += [problem] if problem else []
        if agent["type"] == "command":
            agent["cwd"] = agent.get("cwd") or str(folder.resolve())
            plain["agent"] = sources.with_absolute_paths(agent, ("cwd",), folder)
        else:
            plain["agent"], wrong = read_tools(agent, folder)
            lines += wrong

    return lines


def config_keys() -> ConfigKeys:
    """Every key of `RunConfig` with the options of every registered environment, agent and reward,
    explained."""
    return _keys_with(
        tuple((section, tuple(models.items())) for section, models in key_variants().items())
    )


@lru_cache(maxsize=2)
def _keys_with(variants: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]) -> ConfigKeys:
    """Cached until something is registered, since building the keys takes a tenth of a second."""
    return ConfigKeys(RunConfig, {section: dict(models) for section, models in variants})


def section_variants() -> Variants:
    """The models of the polymorphic sections `environment` and `agent`, by their `type`."""
    return {
        "environment": {name: environments.get(name).Config for name in environments.names()},
        "agent": {name: agent_section(name) for name in agent_names()},
    }


def key_variants() -> Variants:
    """`section_variants`, and the models of the entries that the polymorphic lists may have. An
    object that another package registered and that is not a reward is left out here, and refused
    when a recipe names it."""
    models = {}
    for name in rewards.names():
        with suppress(AgentEvoError):
            models[name] = reward_config(name)
    return {**section_variants(), "rewards": models, "agent.tools": KINDS, **tracker_models()}


def _read_variant(
    section: str, options: Mapping[str, Any], models: Mapping[str, type[pydantic.BaseModel]]
) -> tuple[pydantic.BaseModel | None, list[ErrorDetails], str | None]:
    """Checks a polymorphic section by the model that its `type` names. Returns the section, or the
    problems of its options, or the problem of its type."""
    kind = options.get("type")
    type_names = list(models)
    if not isinstance(kind, str) or kind not in type_names:
        return None, [], describe_wrong_choice(section, options, "type", type_names, OF_YOUR_OWN)

    try:
        return models[kind].model_validate(options), [], None
    except pydantic.ValidationError as error:
        located = [{**detail, "loc": (section, *detail["loc"])} for detail in error.errors()]
        return None, cast(list[ErrorDetails], located), None


def to_yaml(config: RunConfig) -> str:
    """The whole resolved tree, without hyper-parameters that equal their entry's default. Loading
    it gives the same config."""
    tree = config.model_dump(mode="json")
    preset = AlgorithmSection(name=config.algorithm.name).model_dump(mode="json")
    tree["algorithm"] = {
        key: value
        for key, value in tree["algorithm"].items()
        if value is not None or preset[key] is not None
    }
    return dump_yaml(escape_tree(tree))


def changed_to_yaml(config: RunConfig) -> str:
    """The part of the resolved tree that differs from the defaults, including those of the preset
    and of the chosen environment and agent. Loading it gives the same config."""
    resolved = to_tree(config)
    changed = escape_tree(config.model_dump(mode="json", exclude_defaults=True))
    changed["algorithm"] = resolved["algorithm"]
    if resolved["algorithm"] == {"name": AlgorithmSection().name}:
        del changed["algorithm"]

    for section in section_variants():
        if section in changed:
            changed[section] = {"type": resolved[section]["type"], **changed[section]}

    return dump_yaml(_with_names(changed, resolved))


def _with_names(changed: Any, resolved: Any) -> Any:
    """`changed` with the name or type of each entry of a list, which identifies the entry."""
    if isinstance(changed, dict):
        return {key: _with_names(value, resolved[key]) for key, value in changed.items()}
    if not isinstance(changed, list):
        return changed

    return [
        {key: resolved_entry[key] for key in ("name", "type") if key in resolved_entry} | entry
        if isinstance(entry, dict)
        else entry
        for entry, resolved_entry in zip(changed, resolved, strict=True)
    ]


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree that `to_yaml` wrote, completed by the defaults of keys that did not exist at that
    time."""
    defaults = RunConfig().model_dump(mode="json")
    name = (tree.get("algorithm") or {}).get("name")
    if name in PRESETS:
        defaults["algorithm"] = AlgorithmSection(name=name).model_dump(mode="json")

    for section, models in section_variants().items():
        kind = str((tree.get(section) or {}).get("type"))
        if kind in models:
            defaults[section] = models[kind].model_construct().model_dump(mode="json")

    return sources.overlay(defaults, tree)


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The resolved tree, for building another configuration. Its algorithm section has only what
    differs from its preset, so that another preset brings its own values."""
    tree: dict[str, Any] = escape_tree(config.model_dump(mode="json"))
    preset = AlgorithmSection(name=config.algorithm.name).model_dump(mode="json")
    tree["algorithm"] = {
        key: value
        for key, value in tree["algorithm"].items()
        if key == "name" or value != preset[key]
    }
    return tree
