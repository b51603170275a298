"""The commands of `agentevo` that this package adds."""

from __future__ import annotations

import typer

from agentevo.cli.data import data
from agentevo.cli.topics import Topic
from agentevo_evolve.commands import evolve, pipeline, prompts, tasks

data.command("make", context_settings={"ignore_unknown_options": True})(tasks.make)
data.command("grade")(tasks.grade)


def add_commands(app: typer.Typer) -> None:
    """Adds `pipeline`, `evolve` and `optimize`; `data make` and `data grade` are added when this
    module is imported."""
    app.command(rich_help_panel=Topic.TRAINING)(pipeline.pipeline)
    app.command(rich_help_panel=Topic.TRAINING)(evolve.evolve)
    app.command(rich_help_panel=Topic.TRAINING)(prompts.optimize)
