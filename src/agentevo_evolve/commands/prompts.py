"""The command that searches for better texts: `optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides
from agentevo.cli.evaluation import AsJson, Checkpoint
from agentevo.cli.printing import print_note
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.runs.evaluation.contestants import Contestant


def optimize(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN|FILE.py",
            help="A recipe, a run (RUN, RUN@STEP), or a Python file with one @agentevo.agent and "
            "tasks from tasks.train=FILE.",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder for log, report and texts.yaml. Default: runs/NAME-prompts.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the search in --out.")] = False,
    checkpoint: Checkpoint = "",
    as_json: AsJson = False,
) -> None:
    """Search for better prompts, tool descriptions and examples for the same weights, within a
    budget (section optimize). Use the resulting FOLDER/texts.yaml with agent.texts=FILE."""
    import json

    from agentevo_evolve.prompts.optimize import TextOptimization
    from agentevo_evolve.prompts.optimize import optimize as searched
    from agentevo_evolve.prompts.report import lines_of

    contestant = _contestant(target, overrides or [], checkpoint)
    folder = out or Path("runs") / f"{contestant.config.run.name}-prompts"
    summary = searched(
        TextOptimization(contestant=contestant, out=folder, resume=resume), print_note
    )
    if as_json:
        print(json.dumps(summary, indent=1, sort_keys=True))
        return

    for line in lines_of(summary):
        print(line)

    print(f"agent.texts={folder / 'texts.yaml'} (details: {folder / 'report.md'})")


def _contestant(target: str, overrides: list[str], checkpoint: str) -> Contestant:
    from agentevo.config.agents import agent_names
    from agentevo.config.imports import import_all
    from agentevo.config.recipe import build_config
    from agentevo.runs.evaluation.contestants import Contestant as Player
    from agentevo.runs.evaluation.contestants import find_contestants

    if not target.endswith(".py"):
        (contestant,) = find_contestants(target, (), overrides, (), checkpoint)
        return contestant

    path = Path(target)
    if not path.is_file():
        raise ConfigError(f"{target}: there is no such file")

    before = set(agent_names())
    tree = {"import": [str(path.absolute())]}
    import_all(tree, [], where=target, folder=Path.cwd())

    names = sorted(set(agent_names()) - before)
    chosen = any(override.startswith("agent.type=") for override in overrides)
    if len(names) != 1 and not chosen:
        raise ConfigError(
            f"{target}: it registers {', '.join(names) or 'no agent'}: register one function with "
            '@agentevo.agent("NAME"), or say which by agent.type=NAME'
        )

    agent = {} if chosen else {"agent": {"type": names[0]}}
    config = build_config({**tree, **agent}, overrides, where=target, name=path.stem)
    return Player(target, config, Path(checkpoint) if checkpoint else None)
