"""Reads a pipeline: the file, the overrides of the command line, and every check that is possible
before anything is created.

    agentevo pipeline r1 seed=3 cold_start.sft.epochs=2 improve.rl.trainer.steps=5

The first part of an override is a key of the pipeline or the name of a stage. After a stage's name
comes one of the stage's own keys (`repeat`, `options`, ...) or a key of its recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from agentevo.config import RunConfig, sources
from agentevo.config.field_words import entry_problem
from agentevo.config.interpolation import shorten
from agentevo.errors import AgentEvoError, ConfigError, UnknownNameError
from agentevo.runtime.parsing import ParseError, parse_yaml
from agentevo.runtime.paths import name_problem, spelling_hint
from agentevo.runtime.registry import nearest
from agentevo_evolve.pipeline.leaks import LeakError, Leaks
from agentevo_evolve.pipeline.plan import Instance, PipelinePlan, make_plan
from agentevo_evolve.pipeline.recipes import Recipes
from agentevo_evolve.pipeline.references import (
    ReferenceProblem,
    StageReference,
    references_in,
    replace_references,
)
from agentevo_evolve.pipeline.schema import PipelineConfig, StageConfig

ENDING = ".pipeline.yaml"
"""The ending of a packaged pipeline's file name."""


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline."""

    config: PipelineConfig
    where: str
    """The name of the pipeline's file in messages."""
    home: Path
    """The folder that relative paths start from."""
    plan: PipelinePlan

    @property
    def dir(self) -> Path:
        """The pipeline's folder, absolute."""
        folder = self.config.dir if self.config.dir is not None else Path("runs") / self.config.name
        return folder.absolute()

    def recipes(self, seed: int) -> Recipes:
        """The recipes for a seed."""
        return Recipes(self.config, self.where, self.home, seed)


def packaged_pipelines() -> dict[str, Path]:
    """Maps the name of every packaged pipeline to its file."""
    return sources.packaged_files(ENDING)


def find_pipeline(word: str) -> Path:
    """The file of a pipeline, from a YAML path or the name of a packaged pipeline. Raises
    ConfigError."""
    if problem := name_problem(word):
        raise ConfigError(f"pipeline {shorten(word)!r}: {problem}")

    packaged = packaged_pipelines()
    if word.endswith((".yaml", ".yml")):
        if os.path.isfile(word):
            return Path(word)
        names = ", ".join(packaged)
        raise ConfigError(
            f"pipeline {word}: no such file: {spelling_hint(Path(word))}packaged pipelines: {names}"
        )

    if word in packaged:
        return packaged[word]

    guess = nearest(word, list(packaged))
    hint = f"did you mean {guess!r}? " if guess else ""
    raise UnknownNameError(
        f"no pipeline is called {shorten(word)!r}: {hint}packaged pipelines: "
        f"{', '.join(packaged)}; or give the path of a .yaml file"
    )


def load_pipeline(word: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Reads and checks a pipeline's file. Raises ConfigError with a line for each problem, before
    anything is created."""
    path = find_pipeline(str(word))
    name = path.name.removesuffix(ENDING).removesuffix(".yaml").removesuffix(".yml")
    tree = sources.read_yaml(path)
    return build_pipeline(tree, overrides, where=str(path), folder=path.parent, name=name)


def build_pipeline(
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "pipeline",
    folder: Path | None = None,
    name: str = "pipeline",
) -> Pipeline:
    """Like `load_pipeline`, from a mapping. Each problem line begins with `where`. `folder` is the
    folder of relative paths (default: the current one). `name` is the default name."""
    for override in overrides:
        tree = _overridden(tree, override)

    try:
        config = PipelineConfig.model_validate({"name": name, **tree})
    except pydantic.ValidationError as error:
        lines = [f"{where}: {_wrong_entry(problem)}" for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error

    home = (folder or Path.cwd()).absolute()
    pipeline = Pipeline(config, where, home, make_plan(config, where))
    _check_names(pipeline)
    check_recipes(pipeline)

    return pipeline


def _wrong_entry(error: ErrorDetails) -> str:
    """The line about a wrong key or value of a pipeline, or of one of its stages."""
    model: type[pydantic.BaseModel] = PipelineConfig
    place = ""
    loc = error["loc"]
    while len(loc) > 2 and loc[0] == "stages":
        model = StageConfig
        place = f"{place}.stages.{loc[1]}"
        loc = loc[2:]

    return _describe_problem(place, model, {**error, "loc": loc}).removeprefix(".")


def _describe_problem(place: str, model: type[pydantic.BaseModel], error: ErrorDetails) -> str:
    if error["type"] not in ("value_error", "assertion_error"):
        return entry_problem(place, model, error)

    # The wrong value may be a whole stage, which is too long to show.
    key = ".".join(str(part) for part in (place, *error["loc"]))
    return f"{shorten(key) or 'pipeline'}: {error['msg'].removeprefix('Value error, ')}"


def _overridden(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """The tree with the override `first.more=value` applied. Raises ConfigError."""
    key, text = sources.split_override(override)
    try:
        value = parse_yaml(text)
    except ParseError as error:
        raise ConfigError(f"override {shorten(override)}: {error}") from error

    parts = _full_key(tree, key.split("."), override)
    for part in reversed(parts):
        value = {part: value}
    assert isinstance(value, dict)
    return sources.overlay(tree, value)


def _full_key(tree: Mapping[str, Any], parts: list[str], override: str) -> list[str]:
    """`rl.trainer.steps` -> stages.rl.config.trainer.steps."""
    first = parts[0]
    stages = tree.get("stages")
    names = list(stages) if isinstance(stages, Mapping) else []
    if first in PipelineConfig.model_fields and first not in names:
        return parts if first != "stages" else _full_key(tree, parts[1:] or [""], override)

    if first not in names:
        guess = nearest(first, [*names, *PipelineConfig.model_fields])
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"override {shorten(override)}: {first!r} is neither a stage nor a key of a pipeline: "
            f"{hint}the stages are {', '.join(names)}"
        )

    return ["stages", first, *_below_stage(stages[first], parts[1:], override)]  # type: ignore[index]


def _below_stage(stage: Any, parts: list[str], override: str) -> list[str]:
    inner = stage.get("stages") if isinstance(stage, Mapping) else None
    if isinstance(inner, Mapping) and parts and parts[0] in inner:
        return ["stages", parts[0], *_below_stage(inner[parts[0]], parts[1:], override)]

    if not parts:
        raise ConfigError(
            f"override {shorten(override)}: names a stage without a key: write STAGE.repeat=3 or "
            "STAGE.trainer.steps=10"
        )

    is_own = parts[0] in StageConfig.model_fields and (parts[0] != "model" or len(parts) == 1)
    if is_own or isinstance(inner, Mapping):
        return parts

    return ["config", *parts]


def _check_names(pipeline: Pipeline) -> None:
    """Raises ConfigError for folders that can't be created."""
    from agentevo.runtime.paths import check_new_folder

    check_new_folder(pipeline.dir, "dir")
    config = pipeline.config
    if config.overwrite and Path.cwd().is_relative_to(pipeline.dir):
        raise ConfigError(
            f"overwrite would delete {pipeline.dir}, your current folder: set dir to another folder"
        )

    if config.table is not None:
        from agentevo.runs.folder.result_table import check_page

        check_page(config.table)


def check_recipes(pipeline: Pipeline) -> None:
    """Checks the recipe and the options of every stage (for repeated stages, those of the first two
    rounds), and compares held-out tasks with the training data. A path stands in for an output that
    does not exist yet. Raises ConfigError."""
    seed = (pipeline.config.seeds or (pipeline.config.seed,))[0]
    recipes = pipeline.recipes(seed)

    leaks = Leaks()
    problems = list[str]()
    leaked: set[bytes] = set()
    measured = False
    for instance in pipeline.plan.instances:
        if instance.round > 2 or (instance.measures is not None and measured):
            continue

        measured = measured or instance.measures is not None
        place = f"{pipeline.where}: {recipes.place(instance)}"
        try:
            config = checked_config(pipeline, recipes, instance)
            if config is not None:
                leaks.add_stage(config, recipes.place(instance), instance.kind.trains_on)
        except LeakError as error:
            if not error.texts <= leaked:  # later stages with the same leak are not reported again
                problems += [f"{pipeline.where}: {line}" for line in str(error).splitlines()]
            leaked |= error.texts
        except (AgentEvoError, ReferenceProblem) as error:
            lines = str(error).splitlines()
            problems += [
                line if line.startswith((f"{pipeline.where}:", "override")) else f"{place}: {line}"
                for line in lines
            ]

    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _without_texts(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree without `agent.texts` that another stage writes, because that file does not exist
    yet."""
    agent = tree.get("agent")
    if not isinstance(agent, Mapping) or not list(references_in(agent.get("texts"))):
        return tree
    return {**tree, "agent": {key: value for key, value in agent.items() if key != "texts"}}


def checked_config(pipeline: Pipeline, recipes: Recipes, instance: Instance) -> RunConfig | None:
    """The recipe of a stage before any stage has run. Raises ConfigError."""
    meaning = _PlannedOutputs(pipeline, instance)
    kind = instance.kind
    stage = instance.stage
    options = read_options(instance, replace_references(stage.options, meaning))
    model = replace_references(stage.model, meaning) if stage.model is not None else None

    if not kind.reads_recipe:
        if stage.recipe or stage.config or stage.model:
            raise ConfigError(
                f"kind: {stage.kind} reads no recipe: remove recipe, config and model"
            )
        kind.check(None, options, None)
        return None

    tree, folder = recipes.tree(instance, model)
    run_dir = stage_folder(pipeline.dir, instance)
    config = recipes.read(
        instance, replace_references(_without_texts(tree), meaning), folder, run_dir
    )
    kind.check(config, options, model)

    is_checked = instance.measures is not None or stage.kind in ("train", "sample", "sft")
    if is_checked and not list(references_in(tree)):
        from agentevo.runs.orchestration.checks import check_parts, check_sft_parts

        later = bool(list(references_in(stage.model)))  # the model does not exist yet
        if stage.kind == "sft":
            check_sft_parts(config, resume=later, may_fetch=False)
        else:
            check_parts(config, None, resume=later, may_fetch=False)

    return config


def read_options(instance: Instance, options: Mapping[str, Any]) -> Any:
    """The kind's own keys. Raises ConfigError."""
    try:
        return instance.kind.Options.model_validate(options)
    except pydantic.ValidationError as error:
        kind_options = instance.kind.Options
        lines = [_describe_problem("options", kind_options, wrong) for wrong in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def stage_folder(dir_: Path, instance: Instance) -> Path:
    """The folder of an instance, inside the folder of a pipeline for one seed."""
    if instance.measures is not None:
        return dir_ / "held_out" / instance.measures
    return dir_ / "stages" / instance.id


class _PlannedOutputs:
    """The values of references before any stage has run."""

    def __init__(self, pipeline: Pipeline, instance: Instance) -> None:
        self.pipeline = pipeline
        self.one = instance

    def __call__(self, reference: StageReference) -> str | float:
        if reference.scope == "round":
            return self.one.round
        if reference.scope == "stage":
            return str(stage_folder(self.pipeline.dir, self.one))

        targets = self.pipeline.plan.targets(reference, self.one)
        if not targets:
            fallback = reference.fallback
            assert fallback is not None
            return self(fallback) if isinstance(fallback, StageReference) else fallback

        target = self.pipeline.plan.by_id[targets[0]]
        folder = stage_folder(self.pipeline.dir, target)
        if reference.key == "folder":
            return str(folder)

        planned = target.kind.planned_outputs(folder)
        return str(planned[reference.key]) if reference.key in planned else 0.0
