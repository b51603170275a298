"""The commands that say what a recipe may name and what its keys mean: `list`, `models` and
`config`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, Recipe, warn_of_kept_keys
from agentevo.cli.table import first_sentence, print_table
from agentevo.errors import UnknownNameError

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

models = typer.Typer(no_args_is_help=True, help="Download models, and publish trained ones.")
config_commands = typer.Typer(
    no_args_is_help=True, help="Show the resolved configuration and explain its keys."
)


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
    from agentevo.config.imports import import_for
    from agentevo.listings import KINDS, LISTS
    from agentevo.registry import nearest

    if not kind:
        print_table(KINDS.items())
        return

    if kind not in LISTS:
        guess = nearest(kind, list(LISTS))
        hint = f"did you mean {guess!r}? " if guess else ""
        raise UnknownNameError(f"nothing is listed under {kind!r}: {hint}known: {', '.join(LISTS)}")

    if recipe:
        import_for(recipe)

    print_table(LISTS[kind]())


@models.command("list")
def list_models() -> None:
    """List the known models and whether they are on this machine."""
    from agentevo.listings import models as known

    print_table(known())


@models.command("get")
def get_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known model, or a Hub name ORG/NAME.")
    ],
) -> None:
    """Download a model, so that training needs no network."""
    from agentevo.models.resolve import fetch

    print(fetch(name, progress=lambda line: print(line, file=sys.stderr)))


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
    from agentevo.runs.hub_upload import push_to_hub

    print(
        push_to_hub(
            source, repo, private=not public, note=lambda line: print(line, file=sys.stderr)
        )
    )


@config_commands.command("show")
def show_config(
    recipe: Recipe,
    overrides: Overrides = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Print only what differs from the defaults.")
    ] = False,
) -> None:
    """Print the resolved configuration as YAML."""
    from agentevo.config import changed_to_yaml, load_config, to_yaml

    config = load_config(recipe, overrides or [])
    warn_of_kept_keys(recipe, overrides or [])
    print(changed_to_yaml(config) if changed else to_yaml(config), end="")


@config_commands.command("explain")
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A dotted key or a section. Without it, list the sections."
        ),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="Also explain the options of classes that this recipe imports.",
        ),
    ] = "",
) -> None:
    """Explain a key: type, range, default, unit. `algorithm.NAME` explains a preset, advantage,
    policy loss, KL estimate or aggregation."""
    from agentevo.algorithms.describe import describe
    from agentevo.config.imports import import_for
    from agentevo.config.sweep import recipe_keys
    from agentevo.config.tool_list import PLACE, explain_tools

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

    if f"{key}.".startswith(f"{PLACE}.") and (key == PLACE or key not in keys.names()):
        explained = explain_tools(key)
    else:
        explained = keys.explain(key)

    print("\n\n".join(_explanation_text(explanation) for explanation in explained))


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
    print("\n`agentevo config explain SECTION` lists a section's keys.")


def _explanation_text(explanation: Explanation) -> str:
    from agentevo.config.keys import LISTS
    from agentevo.config.tool_list import PLACE

    heading = explanation.key
    section = explanation.key.split(".")[0]
    if explanation.option_of and heading.startswith(f"{PLACE}."):
        heading += f" (with type: {', '.join(explanation.option_of)})"
    elif explanation.option_of:
        listed = next(
            (list_name for list_name in LISTS if heading.startswith(f"{list_name}.")), None
        )
        chooser = f"{listed}.name" if listed else f"{section}.type"
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
