"""`agentevo init`: a recipe to start from, in a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from agentevo.cli.arguments import path_word
from agentevo.errors import ConfigError

START = "first_job"
"""The packaged recipe that is copied unless another is named."""
MARK = "# yours"
"""Stands behind a line of a recipe that is to be changed."""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=path_word, help="A new folder.")
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="The packaged recipe to start from.")
    ] = START,
) -> None:
    """Create a recipe of your own from a packaged one, and say which lines to change
    (docs/first_job.md)."""
    from agentevo.config.sources import packaged_recipes
    from agentevo.errors import UnknownNameError
    from agentevo.runtime.files import must_write
    from agentevo.runtime.paths import check_new_folder

    recipes = packaged_recipes()
    if recipe not in recipes:
        raise UnknownNameError(
            f"no packaged recipe is called {recipe!r}: choose one of {', '.join(recipes)}"
        )

    check_new_folder(folder, "FOLDER")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not empty: give another FOLDER")

    source = recipes[recipe]
    written = folder / source.name
    with must_write(folder, "give another FOLDER"):
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
