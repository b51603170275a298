"""Turns words of the command line into the models that are evaluated.

    RECIPE              a recipe's unchanged model
    RUN, RUN@STEP       a run's best checkpoint, or that of a step (`RUN@last`)
    FOLDER, NAME        a folder with a model or a checkpoint; a known model, or one of the hub
    NAME                a remote model of the recipe (remote_models)
    URL#MODEL           a server of OpenAI's API that needs no key; #MODEL may be left out where it
                        serves only one

The first word decides the play (agent, tasks, rewards, sampling): it is that of the word's recipe
or run. A model without a recipe gets each task as a single prompt, unless overrides change that.
All models play the same tasks, with the same agent and the same seeds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig, build_config, load_config, sources
from agentevo.config.model import ModelSection
from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.inference.remote_models.served import check_served, served_models
from agentevo.models.files.resolve import HUB, HUB_NAME, TINY, resolve
from agentevo.runs.folder.run_folder import UNSCORED, is_run_folder, run_config
from agentevo.runtime.paths import spelling_hint
from agentevo.runtime.registry import nearest

MAX_NEW_TOKENS = 512
"""The default limit of a reply, in tokens, of a model without a recipe."""


@dataclass(frozen=True)
class Contestant:
    """A model, and the configuration that it plays with."""

    label: str
    config: RunConfig
    checkpoint: Path | None = None
    """Replaces the configuration's model."""
    remote: str | None = None
    """The name in the configuration of the remote model that plays."""

    @property
    def origin(self) -> str:
        """Identifies the weights, because the same word can name different weights later."""
        if self.remote is not None:
            section = self.config.remote_models[self.remote]
            return f"{section.url}#{section.model}"
        return str(self.checkpoint or self.config.model.name)


def find_contestants(
    target: str,
    against: Sequence[str],
    overrides: Sequence[str],
    tasks: Sequence[str],
    checkpoint: str = "",
) -> list[Contestant]:
    """The models, the target first. Raises ConfigError for words that name no model, before
    anything is created."""
    first = _resolve_target(target, overrides, tasks)
    if checkpoint:
        first = _with_checkpoint(first, target, checkpoint)

    contestants = [first, *(_resolve_opponent(word, first.config) for word in against)]
    labels = [contestant.label for contestant in contestants]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"--against {twice}: it is already in the evaluation: leave it out")

    for player in contestants:
        if player.remote is not None:
            if first.config.agents:
                raise ConfigError(
                    f"{player.label} can't play for several agents at once: set agents.NAME.remote "
                    "for each"
                )
            check_served(player.remote, player.config.remote_models[player.remote])
        elif player.checkpoint is None and player.config.model.name != TINY:
            resolve(player.config.model.name)
        elif player.checkpoint is not None and not _holds_adapter(player.checkpoint):
            resolve(str(player.checkpoint))

    return contestants


def _resolve_target(word: str, overrides: Sequence[str], tasks: Sequence[str]) -> Contestant:
    run, step = run_of(word)
    if run is not None:
        config = run_config(run, overrides)
        return Contestant(word, config, checkpoint_of(run, config, step))

    if word.endswith((".yaml", ".yml")) or word in sources.recipe_names():
        return Contestant(word, load_config(word, overrides, needs_environment=not tasks))
    if not (_is_url(word) or is_model(word) or _names_remote_model(word, overrides)):
        check_word(word)

    tree: dict[str, Any] = {"sampling": {"max_new_tokens": MAX_NEW_TOKENS}}
    if tasks:
        tree |= {"tasks": {"train": list(tasks)}}
    elif not any(override.startswith(("environment", "tasks", "agent")) for override in overrides):
        raise ConfigError(f"{word}: a model alone has no tasks: give --tasks FILE, or environment=")

    config = build_config(tree, overrides, where=word, needs_environment=not tasks)
    contestant = _resolve_opponent(word, config)
    if contestant.remote is not None or contestant.checkpoint is not None:
        return contestant

    model = config.model.model_copy(update={"name": word})
    return Contestant(word, config.model_copy(update={"model": model}))


def _with_checkpoint(first: Contestant, target: str, which: str) -> Contestant:
    if first.remote is not None:
        raise ConfigError(f"--checkpoint {which}: {target} is a remote model: leave it out")

    run, _ = run_of(target)
    if which in first.config.remote_models or _is_url(which):
        return _resolve_opponent(which, first.config)

    if run is not None:
        path = checkpoint_of(run, first.config, which)
    elif which in ("best", "last"):
        raise ConfigError(
            f"--checkpoint {which} names a checkpoint of a run: give the run's folder instead of "
            f"{target}, or the path of a checkpoint"
        )
    else:
        path = Path(which)

    return Contestant(f"{target}@{which}", first.config, path)


def _resolve_opponent(word: str, base: RunConfig) -> Contestant:
    """A model that plays the tasks of `base`."""
    if word in base.remote_models:
        return Contestant(word, base, remote=word)
    if _is_url(word):
        return _server(word, base)

    run, step = run_of(word)
    if run is not None:
        run_recipe = run_config(run, UNSCORED)
        config = base.model_copy(update={"model": run_recipe.model})
        return Contestant(word, config, checkpoint_of(run, run_recipe, step))

    if word.endswith((".yaml", ".yml")) or word in sources.recipe_names():
        model = load_config(word).model
        return Contestant(word, base.model_copy(update={"model": model}))

    folder = Path(word).expanduser()
    if _holds_adapter(folder):
        return Contestant(word, base, folder)

    model = ModelSection(name=word, dtype=base.model.dtype, device=base.model.device)
    return Contestant(word, base.model_copy(update={"model": model}))


def _server(word: str, base: RunConfig) -> Contestant:
    url, _, model = word.partition("#")
    name = f"evaluated-{len(base.remote_models)}"
    try:
        section = RemoteModelSection(base_url=url, model=model or "?")
    except ValueError as error:
        raise ConfigError(f"{word}: {error}") from error

    if not model:
        model_names = served_models(name, section)
        if model_names is None or len(model_names) != 1:
            has = (
                "has no list of its models"
                if model_names is None
                else f"serves {', '.join(model_names)}"
            )
            raise ConfigError(f"{word}: {url} {has}: name the model, {url}#MODEL")
        section = section.model_copy(update={"model": model_names[0]})

    models = {**base.remote_models, name: section}
    return Contestant(word, base.model_copy(update={"remote_models": models}), remote=name)


def run_of(word: str) -> tuple[Path | None, str]:
    """The folder of a run, and the name of a checkpoint, from RUN or RUN@WHICH. (None, "") for a
    word that does not name a run."""
    if is_run_folder(Path(word)):
        return Path(word), "best"
    folder, at, step = word.rpartition("@")
    is_run = bool(at and folder) and is_run_folder(Path(folder))
    return (Path(folder), step) if is_run else (None, "")


def checkpoint_of(run: Path, config: RunConfig, which: str) -> Path:
    """The folder of a run's checkpoint, given as `best`, `last`, a step or a path. Raises
    ConfigError for a step without a checkpoint, and UnusableCheckpointError."""
    from agentevo.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint.keep_last)
    if not which.isdigit():
        return checkpoints.find(which)

    if int(which) not in checkpoints.steps():
        step_names = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ConfigError(
            f"{run}@{which}: the run has no such checkpoint: its steps are {step_names}"
        )

    return checkpoints.path(int(which))


def _holds_adapter(folder: Path) -> bool:
    return os.path.isfile(folder / "adapter_config.json")


def _is_url(word: str) -> bool:
    return word.startswith(("http://", "https://"))


def is_model(word: str) -> bool:
    """Whether a word names a model: a folder, a known name, or a name on the hub."""
    from agentevo.models.files.known_models import known_models

    folder = Path(word).expanduser()
    files = ("config.json", "adapter_config.json")
    is_folder = any(os.path.isfile(folder / file) for file in files)
    is_hub = word.startswith(HUB) or (
        HUB_NAME.fullmatch(word) and not os.path.exists(folder.parent)
    )
    return is_folder or word in (*known_models.names(), TINY) or bool(is_hub)


def _is_run_or_model(path: Path) -> bool:
    return is_run_folder(path) or is_model(str(path))


def check_word(word: str) -> None:
    """Raises ConfigError for a word that is not a recipe."""
    from agentevo.models.files.known_models import known_models

    try:
        sources.find_recipe(word)
    except UnknownNameError:
        recipes = sources.recipe_names()
        models = [*known_models.names(), TINY]
        guess = nearest(word, [*recipes, *models])
        hint = spelling_hint(Path(word).expanduser(), _is_run_or_model)
        hint = hint or (f"did you mean {guess!r}? " if guess else "")
        raise UnknownNameError(
            f"no recipe, run or model is called {word!r}: {hint}give a recipe "
            f"({', '.join(recipes)}, or the path of a .yaml file), the folder of a run or of "
            f"a model, a known model ({', '.join(models)}), one of the hub (ORG/NAME), a name of "
            "remote_models, or a server as URL#MODEL"
        ) from None


def _names_remote_model(word: str, overrides: Sequence[str]) -> bool:
    keys = (override.partition("=")[0] for override in overrides)
    return any(key == "remote_models" or key.startswith(f"remote_models.{word}") for key in keys)
