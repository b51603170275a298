"""The recipe of a stage: the pipeline's or the stage's own, with the changes of the pipeline and
the stage. The pipeline sets some keys for all stages (name, folder, seed).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig, build_config, sources
from agentevo.config.sources import with_absolute_paths
from agentevo.config.sweep import nest_keys, with_changes
from agentevo.errors import ConfigError
from agentevo.runtime.seeds import derive_seed
from agentevo_evolve.pipeline.plan import Instance
from agentevo_evolve.pipeline.schema import HeldOutSection, PipelineConfig

OWN_KEYS = ("run.seed", "run.name", "run.dir", "run.overwrite", "store.url", "sweep")
"""Keys that the pipeline sets. Stages may not set them."""
FILE_KEYS = {
    "tasks": ("train", "eval"),
    "data": ("train", "eval", "pairs", "pairs_from", "best_of"),
    "rm": ("pairs", "eval"),
    "agent": ("texts",),
}


class Recipes:
    """The recipes of a pipeline for one seed. Each is read once."""

    def __init__(self, config: PipelineConfig, where: str, home: Path, seed: int) -> None:
        """`home`: the folder of the pipeline's file."""
        self.config = config
        self.where = where
        self.home = home
        self.seed = seed
        self._read: dict[str | None, tuple[dict[str, Any], Path]] = {}

    def tree(self, instance: Instance, model: str | None) -> tuple[dict[str, Any], Path]:
        """The recipe's tree with the pipeline's `${...}` unresolved, and the folder that its
        relative paths start from. Raises ConfigError."""
        changes: list[tuple[str, Mapping[str, Any]]] = [("config", self.config.config)]
        if instance.measures is not None:
            assert self.config.held_out is not None
            name = self.config.held_out.recipe or self.config.recipe
            changes.append(("held_out.config", self.config.held_out.config))
            changes.append(("held_out.config", self._texts(instance)))
        else:
            name = instance.stage.recipe or self.config.recipe
            changes.append((f"stages.{'.'.join(instance.path)}.config", instance.stage.config))

        tree, folder = self._recipe(name)
        for key, change in changes:
            change_tree = self._own_change(nest_keys(change), key)
            tree = with_changes(tree, change_tree)

        if instance.measures is not None:
            return self._for_held_out(tree, instance), folder

        tree = sources.overlay(tree, instance.kind.fixed_settings(None))
        if model is not None:
            tree = with_model(tree, model, nest_keys(instance.stage.config))

        if instance.stage.reference != "start":
            algorithm = {"reference_model": instance.stage.reference}
            tree = sources.overlay(tree, {"algorithm": algorithm})

        if instance.stage.optimizer == "carried":
            tree = sources.overlay(tree, {"trainer": {"optimizer_from": model}})

        return tree, folder

    def _texts(self, instance: Instance) -> dict[str, Any]:
        """The texts of the measured stage, which replace the recipe's texts, because the stage's
        model was trained with them. If a stage makes texts, next_stages.py adds them later."""
        written = nest_keys(instance.stage.config).get("agent")
        texts = written.get("texts") if isinstance(written, Mapping) else None
        return {} if texts is None else {"agent": {"texts": texts}}

    def _recipe(self, name: str | None) -> tuple[dict[str, Any], Path]:
        if name not in self._read:
            if name is None:
                self._read[name] = ({}, self.home)
            else:
                local_path = self.home / os.path.expanduser(name)
                path = local_path if os.path.isfile(local_path) else sources.find_recipe(name)
                self._read[name] = (sources.read_yaml(path), path.parent)

        return self._read[name]

    def _own_change(self, change: dict[str, Any], key: str) -> dict[str, Any]:
        """The change with absolute paths in place of those relative to the pipeline's folder.
        Raises ConfigError for keys that the pipeline sets."""
        for leaf in sources.leaves(change):
            taken = next(
                (own_key for own_key in OWN_KEYS if f"{leaf}.".startswith(f"{own_key}.")), None
            )
            if taken:
                raise ConfigError(
                    f"{self.where}: {key}: sets {leaf}, which the pipeline sets for each stage: "
                    "remove it"
                )

        for section, keys in FILE_KEYS.items():
            if section in change:
                change[section] = with_absolute_paths(change[section], keys, self.home)

        if isinstance(change.get("import"), list):
            change["import"] = [self._import_path(module) for module in change["import"]]

        return change

    def _import_path(self, module: Any) -> Any:
        path = self.home / str(module)
        return str(path.resolve()) if str(module).endswith(".py") and path.is_file() else module

    def _for_held_out(self, tree: dict[str, Any], instance: Instance) -> dict[str, Any]:
        held_out = self.config.held_out
        assert isinstance(held_out, HeldOutSection)
        return sources.overlay(tree, {"evaluation": {"tasks": held_out.tasks}})

    def read(
        self, instance: Instance, tree: Mapping[str, Any], folder: Path, run_dir: Path
    ) -> RunConfig:
        """Checks a tree without references of the pipeline. Raises ConfigError."""
        run_settings = {
            "run": {
                "name": instance.id.replace("@", "-"),
                "dir": str(run_dir),
                "seed": self.seed_of(instance),
                "overwrite": False,
            }
        }
        if self.config.parallel > 1:
            tree = sources.overlay({"run": {"threads": 1}}, tree)

        return build_config(
            sources.overlay(tree, run_settings),
            where=f"{self.where}: {self.place(instance)}",
            folder=folder,
            needs_environment=instance.kind.needs_environment,
        )

    def seed_of(self, instance: Instance) -> int:
        """The run.seed of an instance."""
        if instance.measures is not None:
            assert self.config.held_out is not None
            return self.config.held_out.seed
        return derive_seed(self.seed, "stage", instance.id) % 2**31

    def place(self, instance: Instance) -> str:
        """The place of the instance in the file."""
        return "held_out" if instance.measures is not None else ".".join(["stages", *instance.path])


def with_model(
    tree: Mapping[str, Any], model: str, stage_config: Mapping[str, Any]
) -> dict[str, Any]:
    """The tree with another initial model. A tiny policy's shape is removed with its name, unless
    the stage sets a shape itself. Adapters to train further go into model.lora.adapter."""
    section = tree.get("model")
    model_section = dict(section) if isinstance(section, Mapping) else {}
    if model != "tiny" and not (
        isinstance(stage_config.get("model"), Mapping) and "tiny" in stage_config["model"]
    ):
        model_section.pop("tiny", None)

    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        # An adapter has its own settings, except those of the base model.
        lora = model_section.get("lora")
        kept_lora = (
            {"quantize": lora["quantize"]} if isinstance(lora, dict) and "quantize" in lora else {}
        )
        model_section["lora"] = {**kept_lora, "adapter": model}
    else:
        model_section["name"] = model

    return {**tree, "model": model_section}
