"""Arguments that several commands take."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from agentevo.errors import ConfigError

LONGEST_WAIT_S = 86_400.0

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A .yaml file, or the name of a packaged recipe (`agentevo list recipes`).",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Changes to the recipe, such as trainer.steps=10."),
]


def written_options(context: typer.Context) -> dict[str, str]:
    """The options on the command line: parameter -> the option's name."""
    return {
        str(parameter.name): parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        and getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    }


def refuse_options(
    context: typer.Context, reason: str, names: Collection[str] = (), allowed: Collection[str] = ()
) -> None:
    """Raises ConfigError if the command line has an option of these parameters, or, without
    `names`, any option but those of `allowed`."""
    for name, option in written_options(context).items():
        if (name in names) if names else (name not in allowed):
            raise ConfigError(f"{option} {reason}")


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for a file that exists, unless `overwrite` is set."""
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ConfigError(
            f"{path} is there already: give another file, or replace it with --overwrite"
        )


def seconds(word: str | float) -> float:
    """Parser of options that are a time to wait. Raises ConfigError for any other word, and for a
    time below 0 or above LONGEST_WAIT_S."""
    try:
        value = float(word)
    except ValueError:
        value = -1.0

    if not 0.0 <= value <= LONGEST_WAIT_S:
        raise ConfigError(
            f"{str(word)[:60]!r}: give seconds, from 0 to {LONGEST_WAIT_S:,.0f} (a day)"
        )

    return value


RunDir = Annotated[
    Path,
    typer.Argument(metavar="RUN_DIR", help="The folder of a run, such as runs/coins."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        parser=seconds,
        help="Seconds to wait for an unreachable database. Default: 15.",
    ),
]
Resume = Annotated[bool, typer.Option(help="Resume the run in this folder.")]
DryRun = Annotated[
    bool,
    typer.Option(
        help="Check everything and print the resolved configuration, without downloading or "
        "writing anything."
    ),
]


def warn_of_kept_keys(recipe: str, overrides: list[str]) -> None:
    """Warns of values that the recipe sets and that therefore override those of a preset that the
    command line chooses."""
    from agentevo.config import config_keys, sources
    from agentevo.config.preset_keys import kept_keys

    path = sources.find_recipe(recipe)
    tree = sources.read_yaml(path)
    for line in kept_keys(tree, overrides, where=str(path), is_text=config_keys().is_text):
        print(f"warning: {line}", file=sys.stderr)


Host = Annotated[
    str, typer.Option(help="The address to listen on. 0.0.0.0 accepts other machines.")
]
Tls = Annotated[
    bool | None,
    typer.Option(
        help="Encrypt with a self-signed certificate, a run's own. Default: on, unless --host is "
        "this machine."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port. 0 chooses a free one.")]


def plain_options(settings: list[str], example: str = "size=3") -> dict[str, Any]:
    """The options in words `key=value`, whose values are YAML. Raises ConfigError."""
    from agentevo.runtime.parsing import ParseError, parse_yaml

    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"{setting!r}: write key=value, such as {example}")
        try:
            values[key] = parse_yaml(text)
        except ParseError as error:
            raise ConfigError(f"{key}: {error}") from error

    return values


def check_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call, from the option `--arguments`. Raises ConfigError if it is not
    a JSON object."""
    from agentevo.runtime.parsing import ParseError, parse_json

    example = """write an object of JSON, such as '{"amount": 5}'"""
    try:
        arguments = parse_json(text)
    except ParseError as error:
        raise ConfigError(f"--arguments: {error}: {example}") from error

    if not isinstance(arguments, dict):
        raise ConfigError(f"--arguments: this is not an object: {example}")

    return arguments
