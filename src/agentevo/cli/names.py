"""The commands that say what a recipe may name and what its keys mean: `list`, `models` and
`config`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, refuse_options, warn_of_kept_keys
from agentevo.cli.printing import first_sentence, print_note, print_table
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.runtime.progress import bar

if TYPE_CHECKING:
    from agentevo.config.keys import ConfigKeys, Explanation

MAIN_KEYS = {
    "What is trained": ("model.name", "model.lora.rank", "model.dtype"),
    "What it is trained on": ("environment.type", "tasks.train", "agent.type"),
    "How it learns": (
        "algorithm.name",
        "trainer.steps",
        "trainer.groups_per_step",
        "trainer.group_size",
        "trainer.learning_rate",
    ),
    "How it samples and is measured": (
        "sampling.max_new_tokens",
        "engine.type",
        "evaluation.every",
    ),
    "Memory": ("memory.checkpointing",),
}
"""The fifteen keys that a beginner meets, by topic."""

MARK = "# yours"
"""Stands behind a line of a recipe that is to be changed."""


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="environments, agents, tools, rewards, algorithms, models, recipes, pipelines, "
            "stages, engines, transports, stores, sandboxes or trackers. Without it, list the "
            "kinds.",
        ),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="Also list what this recipe imports."),
    ] = "",
) -> None:
    """List the recipes, models, algorithms and other names that a recipe can use."""
    from agentevo.cli import listings
    from agentevo.cli.packages import package_modules
    from agentevo.config.imports import import_for
    from agentevo.runtime.registry import nearest

    modules = (listings, *package_modules("listings"))
    if not kind:
        print_table([row for module in modules for row in module.KINDS.items()])
        return

    lists = {name: rows for module in modules for name, rows in module.LISTS.items()}
    if kind not in lists:
        guess = nearest(kind, list(lists))
        hint = f"did you mean {guess!r}? " if guess else ""
        raise UnknownNameError(f"nothing is listed under {kind!r}: {hint}known: {', '.join(lists)}")

    if recipe:
        import_for(recipe)

    print_table(lists[kind]())


def models(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RUN|CHECKPOINT",
            help="A known model, or a Hub name ORG/NAME. With --merge or --push: a run (its best "
            "checkpoint), RUN@last, RUN@STEP, or the folder of a model or adapter.",
        ),
    ],
    merge: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Merge an adapter (model.lora) into its base model, in this new folder.",
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="With --merge: the base model, a name or folder, if it has moved since training.",
        ),
    ] = "",
    push: Annotated[
        str,
        typer.Option(
            metavar="ORG/NAME",
            help="Publish with a model card in this repository of the Hugging Face Hub. Uses "
            "HF_TOKEN or `hf auth login`, and prints the commit's URL.",
        ),
    ] = "",
    public: Annotated[
        bool,
        typer.Option("--public", help="With --push: make a new repository public, not private."),
    ] = False,
) -> None:
    """Download a model, so that training needs no network; merge an adapter into its base model
    (--merge); or publish a checkpoint (--push)."""
    if merge is None:
        refuse_options(context, "is for --merge: add it", ("base",))
    if not push:
        refuse_options(context, "is for --push: add it", ("public",))
    if merge is not None and push:
        raise ConfigError("--merge and --push: merge first, then push the merged folder")

    if push:
        from agentevo.runs.folder.hub_upload import push_to_hub

        print(push_to_hub(source, push, private=not public, note=print_note))
    elif merge is not None:
        print(_merge(Path(source), merge, base or None))
    else:
        from agentevo.models.files.resolve import fetch

        print(fetch(source, progress=print_note))


def _merge(source: Path, out: Path, base: str | None) -> Path:
    from agentevo.runs.folder.run_folder import UNSCORED, is_run_folder, run_config

    if is_run_folder(source):
        from agentevo.api.run import Run

        source = Run(run_config(source, UNSCORED)).checkpoint

    from agentevo.models.files.merge import merge_adapter

    with bar("models --merge"):
        return merge_adapter(source, out, base)


def config(
    context: typer.Context,
    word: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|KEY]",
            help="A .yaml file or the name of a packaged recipe to show, or a dotted key or a "
            "section to explain. Without it, list the main keys and the sections.",
        ),
    ] = "",
    overrides: Overrides = None,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Of a recipe, print only what differs from the defaults."),
    ] = False,
    copy: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead, copy a packaged recipe into this new folder, and say which lines to "
            "change (docs/first_job.md).",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="Also explain the options of classes that this recipe imports.",
        ),
    ] = "",
) -> None:
    """Show a recipe's resolved configuration, or explain a key: type, range, default, unit.
    The name of a preset, advantage, policy loss, KL estimate or aggregation explains it."""
    from agentevo.config.sources import recipe_names

    if word.endswith((".yaml", ".yml")) or "/" in word or word in recipe_names():
        refuse_options(context, "is for a key: leave it out for a recipe", ("recipe",))
        if copy is not None:
            _copy_recipe(word, copy)
            return
        _show_config(word, overrides or [], changed)
        return

    refuse_options(context, "is for a recipe: leave it out for a key", ("changed", "copy"))
    if overrides:
        raise ConfigError(f"{overrides[0]}: changes are for a recipe, and {word} is none")
    _explain(word, recipe)


def _show_config(recipe: str, overrides: list[str], changed: bool) -> None:
    from agentevo.config import changed_to_yaml, load_config, to_yaml

    resolved = load_config(recipe, overrides)
    warn_of_kept_keys(recipe, overrides)
    print(changed_to_yaml(resolved) if changed else to_yaml(resolved), end="")


def _copy_recipe(recipe: str, folder: Path) -> None:
    from agentevo.config.sources import packaged_recipes
    from agentevo.runtime.files import must_write
    from agentevo.runtime.paths import check_new_folder

    recipes = packaged_recipes()
    if recipe not in recipes:
        raise UnknownNameError(
            f"no packaged recipe is called {recipe!r}: choose one of {', '.join(recipes)}"
        )

    check_new_folder(folder, "--copy")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not empty: give another --copy")

    source = recipes[recipe]
    written = folder / source.name
    with must_write(folder, "give another --copy"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.parent.iterdir()):
            if file == source or file.suffix in (".py", ".jsonl"):
                shutil.copyfile(file, folder / file.name)

    lines = written.read_text(encoding="utf-8").splitlines()
    marked = [(number, line) for number, line in enumerate(lines, 1) if MARK in line]
    print(f"{written} is ready; check it with: agentevo train {written} --dry-run")
    if marked:
        print("lines to change:")
    for number, line in marked:
        print(f"  {written}:{number}: {line.strip()}")


def _explain(key: str, recipe: str) -> None:
    from agentevo.algorithms.describe import describe
    from agentevo.config.imports import import_for
    from agentevo.config.sweep import recipe_keys

    if recipe:
        import_for(recipe)

    keys = recipe_keys()
    if not key:
        _print_overview(keys)
        return

    if key not in keys.names() and (texts := describe(key.removeprefix("algorithm."))):
        print("\n\n".join(texts))
        return

    print("\n\n".join(_explanation_text(explanation) for explanation in keys.explain(key)))


def _print_overview(keys: ConfigKeys) -> None:
    """Prints the main keys by topic, then all sections."""
    main = [keys.explain(key)[0] for topic in MAIN_KEYS.values() for key in topic]
    width = max(len(explanation.key) for explanation in main)
    default_width = max(len(explanation.default) for explanation in main)
    print("The keys to set first, with their defaults:")
    for topic, topic_keys in MAIN_KEYS.items():
        print(f"\n{topic}")
        for explanation in main:
            if explanation.key in topic_keys:
                name = f"{explanation.key:<{width}}  {explanation.default:<{default_width}}"
                print(f"  {name}  {first_sentence(explanation.meaning)}")

    print("\nAll sections:\n")
    print_table((section.key, first_sentence(section.meaning)) for section in keys.sections())
    print("\n`agentevo config SECTION` lists a section's keys.")


def _explanation_text(explanation: Explanation) -> str:
    from agentevo.config.keys import LISTS

    heading = explanation.key
    if explanation.option_of:
        choosers = [
            f"{name}.{key}" for name, key in LISTS.items() if heading.startswith(f"{name}.")
        ]
        chooser = choosers[0] if choosers else f"{heading.split('.')[0]}.type"
        heading += f" (with {chooser}={', '.join(explanation.option_of)})"

    lines = [heading, f"  {explanation.meaning}"]
    if explanation.keys:
        names = [
            f"{key.key} ({', '.join(key.option_of)})" if key.option_of else key.key
            for key in explanation.keys
        ]
        return "\n".join(
            [
                *lines,
                "",
                *(
                    f"  {name}\n      {key.meaning}"
                    for name, key in zip(names, explanation.keys, strict=True)
                ),
            ]
        )

    return "\n".join(
        [
            *lines,
            f"  type     {explanation.type}",
            f"  default  {explanation.default or 'none: it must be given'}",
            f"  unit     {explanation.unit or 'none'}",
        ]
    )
