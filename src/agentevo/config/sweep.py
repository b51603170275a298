"""A sweep: one recipe run as every variant with every seed. Each run has its own process and
folder.

A recipe's top-level key `sweep` defines them. A member's configuration merges these, later ones on
top:

    the recipe  <-  its variant's overrides  <-  overrides of the command line
                <-  run.name, run.dir and run.seed of the member

Every member is checked when the sweep is read, so nothing starts if one of them is invalid.
`RunConfig` does not depend on sweeps: a member is an ordinary run. Importing this module imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field, field_validator

from agentevo.config import (
    RunConfig,
    RunSection,
    Section,
    build_config,
    key_variants,
    sources,
)
from agentevo.config.field_words import suggest_nearest
from agentevo.config.imports import check_recipe_of_run
from agentevo.config.keys import ConfigKeys, refused_values
from agentevo.config.preset_keys import drop_idle_keys
from agentevo.errors import ConfigError
from agentevo.runtime.cpu_threads import allowed_cpus
from agentevo.runtime.section import ONE_OR_MANY

S = TypeVar("S", bound=Section)
OWN_KEYS = ("run.seed", "run.name", "run.dir", "run.overwrite", "sweep")
"""The keys that the sweep sets for its members. Variants may not set them."""


class SweepSection(Section):
    """Several runs of one recipe, every variant with every seed, started by `agentevo train`. A
    table compares them at the end."""

    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of each variant -> its changes of the recipe, as dotted keys. If a variant changes the
    environment's type, the recipe's options for the environment are dropped. Default: one variant,
    the unchanged recipe, under the run's name."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)
    """Each variant runs once with each of these as run.seed."""
    only: Annotated[tuple[str, ...] | None, ONE_OR_MANY] = None
    """Run these variants only. Default: all."""
    parallel: int | None = Field(default=None, ge=1)
    """Number of parallel runs. Each is a separate process with run.threads threads (default 1).
    Default: as many as fit on the CPU cores."""
    table: Path | None = None
    """A Markdown file. When every run has succeeded, the table is written between its lines `<!--
    table -->` and `<!-- /table -->`. The table is also in the sweep's folder."""

    @field_validator("seeds")
    @classmethod
    def _different_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError(
                f"got {list(value)}; a seed is listed twice, and the same seed gives the same "
                "run: give each once"
            )
        return value

    @field_validator("variants")
    @classmethod
    def _variants_are_folders_and_keep_to_their_own(
        cls, value: dict[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        for name, changes in value.items():
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(
                    f"got the name {name!r}; it becomes a folder: use letters, digits, and `_ . "
                    "+ -` after the first"
                )

            leaves = sources.leaves(nest_keys(changes))
            taken = [
                key
                for key in leaves
                if any(f"{key}.".startswith(f"{own_key}.") for own_key in OWN_KEYS)
            ]
            if taken:
                raise ValueError(
                    f"{name} sets {taken[0]}, which the sweep sets for each of its runs: remove it"
                )

        return value

    @field_validator("only")
    @classmethod
    def _only_what_there_is(
        cls, value: tuple[str, ...] | None, info: pydantic.ValidationInfo
    ) -> tuple[str, ...] | None:
        variant_names = list(info.data.get("variants", {}))
        for name in value or ():
            if name not in variant_names:
                raise ValueError(
                    f"no variant is called {name!r}: {suggest_nearest(name, variant_names)}there "
                    f"are {', '.join(variant_names) or 'no variants'}"
                )

        if value == ():
            raise ValueError("names no variant: leave it out to run all")

        return value

    @property
    def chosen(self) -> list[str]:
        """Names of the variants to run, in the order of the recipe."""
        return [name for name in self.variants if self.only is None or name in self.only]


class RecipeFile(RunConfig):
    """Everything that a recipe file can contain: the keys of a run and of a sweep."""

    sweep: SweepSection = SweepSection()


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    variant: str
    config: RunConfig
    changes: Mapping[str, Any]
    """Dotted key -> value that its variant changes in the recipe."""

    @property
    def name(self) -> str:
        return member_name(self.variant, self.config.run.seed)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. Members are ordered seed by seed, so that an early table already has every
    variant."""

    name: str
    dir: Path
    overwrite: bool
    section: SweepSection
    members: tuple[Member, ...]

    @property
    def parallel(self) -> int:
        """The number of runs at a time; at most the number of the sweep's runs."""
        threads = max(member.config.run.threads or 1 for member in self.members)
        return min(self.section.parallel or max(allowed_cpus() // threads, 1), len(self.members))


def member_name(variant: str, seed: int) -> str:
    """The name of a run within its sweep, which is also the name of its folder: `ppo-0`."""
    return f"{variant}-{seed}"


def recipe_keys() -> ConfigKeys:
    """Every key of a recipe file, explained."""
    return ConfigKeys(RecipeFile, key_variants())


def load_sweep(recipe: str | Path, overrides: Sequence[str] = ()) -> Sweep | None:
    """The sweep that a recipe and the overrides ask for, or None if they ask for one run
    (`sweep=null` does).

    Raises `ConfigError` with a line for each problem of any member.
    """
    path = sources.find_recipe(str(recipe))
    tree = sources.read_yaml(path)
    check_recipe_of_run(path, tree, overrides)
    for_sweep = [
        text for text in overrides if sources.split_override(text)[0].partition(".")[0] == "sweep"
    ]
    for_runs = [text for text in overrides if text not in for_sweep]
    keys = recipe_keys()
    sweep_tree = sources.merge(tree, for_sweep, where=str(path), is_text=keys.is_text).get("sweep")
    if sweep_tree is None:
        return None

    section = _read(SweepSection, "sweep", sweep_tree, keys, for_sweep, str(path))
    base = {key: value for key, value in tree.items() if key != "sweep"}
    run = _read_run(base, for_runs, keys, path, written="sweep" in tree)
    if not section.variants:
        section = section.model_copy(update={"variants": {run.name: {}}})

    folder = run.dir if run.dir is not None else Path("runs") / run.name
    if run.overwrite and Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"run.overwrite would delete {folder.resolve()}, your current folder: set run.dir to "
            "another folder"
        )

    configs = _member_configs(base, section, for_runs, path)
    members = [
        _member(variant, config, section, seed, folder)
        for seed in section.seeds
        for variant, config in configs.items()
    ]
    return Sweep(run.name, folder, run.overwrite, section, tuple(members))


def _read(
    model: type[S], name: str, value: object, keys: ConfigKeys, overrides: Sequence[str], where: str
) -> S:
    """Reads one section alone. Raises the `ConfigError` that the whole tree would."""
    lines = refused_values({name: value}, keys, chosen={})
    try:
        section = model.model_validate(value)
    except pydantic.ValidationError as error:
        refused = {line.partition(":")[0] for line in lines}
        problems = [
            keys.problem({**detail, "loc": (name, *detail["loc"])}, chosen={})
            for detail in error.errors()
        ]
        lines += [line for line in problems if line.partition(":")[0] not in refused]

    sources.refuse(lines, overrides, where)
    return section


def _read_run(
    base: Mapping[str, Any],
    overrides: Sequence[str],
    keys: ConfigKeys,
    path: Path,
    *,
    written: bool,
) -> RunSection:
    """The sweep's own name and folder. Refuses keys that its members can't share. A recipe that is
    not `written` as a sweep may have a seed."""
    plain = sources.merge(base, overrides, where=str(path), is_text=keys.is_text)
    run_tree = plain.get("run", {})
    if isinstance(run_tree, dict):
        run_tree = {"name": path.stem, **run_tree}
        where = sources.written_in("run.seed:", overrides, str(path))
        if "seed" in run_tree and (written or where == "override"):
            raise ConfigError(
                f"{where}: run.seed: a sweep runs with every seed of sweep.seeds: write "
                f"sweep.seeds=[{run_tree['seed']}]"
            )

    store = plain.get("store")
    if isinstance(store, dict) and store.get("url") is not None:
        where = sources.written_in("store.url:", overrides, str(path))
        raise ConfigError(
            f"{where}: store.url: the runs of a sweep can't share a store: remove it, and each "
            "run has a store in its folder"
        )

    return _read(RunSection, "run", run_tree, keys, overrides, str(path))


def _member_configs(
    base: Mapping[str, Any], section: SweepSection, overrides: Sequence[str], path: Path
) -> dict[str, RunConfig]:
    """Chosen variant -> its checked configuration. A problem that every variant has is reported
    once, as the recipe's."""
    configs: dict[str, RunConfig] = {}
    problems: dict[str, list[str]] = {}
    for variant in section.chosen:
        try:
            tree = sources.overlay(
                {"run": {"threads": 1}}, with_changes(base, nest_keys(section.variants[variant]))
            )
            configs[variant] = build_config(
                tree,
                [*overrides, f"run.name={variant}", "run.overwrite=false"],
                where=str(path),
                folder=path.parent,
            )
        except ConfigError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(variant)

    if problems:
        raise ConfigError(
            "\n".join(
                text
                for line, variants in problems.items()
                for text in _of_variants(line, variants, section, path)
            )
        )

    return configs


def _of_variants(
    line: str, variants: Sequence[str], section: SweepSection, path: Path
) -> list[str]:
    """The lines about a problem of these variants: one line if the recipe or an override causes it,
    else one for each variant."""
    if not line.startswith(f"{path}: ") or (
        len(variants) == len(section.chosen)
        and (len(variants) > 1 or not section.variants[variants[0]])
    ):
        return [line]

    return [
        f"{path}: sweep.variants.{variant}: {line.removeprefix(f'{path}: ')}"
        for variant in variants
    ]


def nest_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings: {"trainer.steps": 3} -> {"trainer": {"steps": 3}}."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        for part in reversed(str(key).split(".")):
            value = {part: value}
        tree = sources.overlay(tree, value)
    return tree


def with_changes(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with a variant's changes. If a variant changes the type of the environment or
    agent, its options are removed, since they belong to the old type."""
    replaced = [key for key in ("environment", "agent") if _is_other_type(base, changes, key)]
    unchanged = {key: value for key, value in base.items() if key not in replaced}
    tree = sources.overlay(unchanged, changes)
    drop_idle_keys(base, tree, sources.leaves(changes))
    return tree


def _is_other_type(base: Mapping[str, Any], changes: Mapping[str, Any], key: str) -> bool:
    was = base.get(key)
    now = changes.get(key)
    if not (isinstance(was, Mapping) and isinstance(now, Mapping)):
        return False
    return bool(now.get("type", was.get("type")) != was.get("type"))


def _member(
    variant: str, config: RunConfig, section: SweepSection, seed: int, folder: Path
) -> Member:
    run = config.run.model_copy(update={"seed": seed, "dir": folder / member_name(variant, seed)})
    return Member(variant, config.model_copy(update={"run": run}), section.variants[variant])
