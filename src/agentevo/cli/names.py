"""The commands that say what a recipe may name and what its keys mean: `list`, `models` and
`config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, path_word, refuse_options, warn_of_kept_keys
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

models = typer.Typer(no_args_is_help=True, help="Download, merge and publish models.")


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


@models.command("get")
def get_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known model, or a Hub name ORG/NAME.")
    ],
) -> None:
    """Download a model, so that training needs no network."""
    from agentevo.models.files.resolve import fetch

    print(fetch(name, progress=print_note))


@models.command("push")
def push_model(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run (its best checkpoint), RUN@last, RUN@STEP, or the folder of a model or "
            "adapter.",
        ),
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="ORG/NAME on the Hugging Face Hub.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public instead of private.")
    ] = False,
) -> None:
    """Publish a checkpoint or adapter with a model card on the Hugging Face Hub. Uses HF_TOKEN or
    `hf auth login`, and prints the commit's URL."""
    from agentevo.runs.folder.hub_upload import push_to_hub

    print(push_to_hub(source, repo, private=not public, note=print_note))


@models.command("merge")
def merge_model(
    source: Annotated[
        Path,
        typer.Argument(
            parser=path_word,
            metavar="CHECKPOINT|RUN_DIR",
            help="The folder of an adapter, or of a run (uses its best checkpoint).",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(parser=path_word, metavar="OUT", help="The folder for the merged model."),
    ],
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The base model, a name or a folder, if it has moved since training.",
        ),
    ] = "",
) -> None:
    """Merge an adapter (model.lora) into its base model."""
    from agentevo.runs.folder.run_folder import UNSCORED, is_run_folder, run_config

    if is_run_folder(source):
        from agentevo.api.run import Run

        source = Run(run_config(source, UNSCORED)).checkpoint

    from agentevo.models.files.merge import merge_adapter

    with bar("merge"):
        merged = merge_adapter(source, out, base or None)

    print(merged)


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
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="Also explain the options of classes that this recipe imports.",
        ),
    ] = "",
) -> None:
    """Show a recipe's resolved configuration, or explain a key: type, range, default, unit.
    `algorithm.NAME` explains a preset, advantage, policy loss, KL estimate or aggregation."""
    from agentevo.config.sources import recipe_names

    if word.endswith((".yaml", ".yml")) or "/" in word or word in recipe_names():
        refuse_options(context, "is for a key: leave it out for a recipe", ("recipe",))
        _show_config(word, overrides or [], changed)
        return

    refuse_options(context, "is for a recipe: leave it out for a key", ("changed",))
    if overrides:
        raise ConfigError(f"{overrides[0]}: changes are for a recipe, and {word} is none")
    _explain(word, recipe)


def _show_config(recipe: str, overrides: list[str], changed: bool) -> None:
    from agentevo.config import changed_to_yaml, load_config, to_yaml

    resolved = load_config(recipe, overrides)
    warn_of_kept_keys(recipe, overrides)
    print(changed_to_yaml(resolved) if changed else to_yaml(resolved), end="")


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

    if (
        key not in keys.names()
        and key.startswith("algorithm.")
        and (texts := describe(key.removeprefix("algorithm.")))
    ):
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
