"""The commands that say what a recipe may name and what its keys mean: `list`, `models` and
`config`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, Recipe, warn_of_kept_keys
from agentevo.cli.table import print_table
from agentevo.errors import UnknownNameError

if TYPE_CHECKING:
    from agentevo.config.keys import Explanation

models = typer.Typer(
    no_args_is_help=True, help="Small models known by name, and what was trained on the hub."
)
config_commands = typer.Typer(
    no_args_is_help=True, help="What a recipe resolves to, and what each key means."
)


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="environments, agents, tools, rewards, algorithms, models, recipes, pipelines, "
            "stages, engines, transports, stores, sandboxes or trackers. Without it, the kinds.",
        ),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="List also what this recipe imports of your own."),
    ] = "",
) -> None:
    """List what a recipe may name."""
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
        str, typer.Argument(metavar="NAME", help="A known model, or a hub name org/name.")
    ],
) -> None:
    """Download a model, so that training starts at once and needs no network."""
    from agentevo.models.resolve import fetch

    print(fetch(name, progress=lambda line: print(line, file=sys.stderr)))


@models.command("push")
def push_model(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run, for its best checkpoint, RUN@last, RUN@STEP, or the folder of a model or "
            "adapter.",
        ),
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="ORG/NAME on the Hugging Face hub.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, not private.")
    ] = False,
) -> None:
    """Publish a checkpoint or adapter with a model card on the Hugging Face hub, in one commit,
    with the token of HF_TOKEN or `hf auth login`. Prints the commit's URL."""
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
        bool, typer.Option("--changed", help="Only what differs from the defaults.")
    ] = False,
) -> None:
    """Print the whole resolved configuration as YAML."""
    from agentevo.config import changed_to_yaml, load_config, to_yaml

    config = load_config(recipe, overrides or [])
    warn_of_kept_keys(recipe, overrides or [])
    print(changed_to_yaml(config) if changed else to_yaml(config), end="")


@config_commands.command("explain")
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A dotted key, or a section. Without it, the sections."
        ),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="Explain also the options of classes of your own, which this recipe imports.",
        ),
    ] = "",
) -> None:
    """Say what a key means: type, range, default, unit. `algorithm.NAME` explains a preset,
    advantage, policy loss, KL or aggregation."""
    from agentevo.catalogue.describe import describe
    from agentevo.config.imports import import_for
    from agentevo.config.sweep import recipe_keys
    from agentevo.config.tool_keys import PLACE, explain_tools

    if recipe:
        import_for(recipe)

    keys = recipe_keys()
    if not key:
        print_table((section.key, section.meaning) for section in keys.sections())
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


def _explanation_text(explanation: Explanation) -> str:
    from agentevo.config.keys import LISTS
    from agentevo.config.tool_keys import PLACE

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
