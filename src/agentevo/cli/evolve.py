"""`agentevo evolve` and its shortest form, `agentevo mcp-rl`: from a server of tools, or documents,
to a better agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, Resume
from agentevo.cli.table import print_table

if TYPE_CHECKING:
    from agentevo.evolution.evolve import Evolution

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The URL of an MCP server, a quoted command that starts one, documents, a folder "
        "of them, or a YAML file with a section `evolve` or `agent.tools`.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and list the stages, without calling a server or creating anything.",
    ),
]


def evolve(
    target: Target, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Train an agent for a tool server or for documents: make tasks, demonstrate, fine-tune, learn
    from reward, and repeat with harder tasks (docs/evolve.md). This calls the server's tools."""
    _evolve(target, overrides or [], resume, dry_run)


def mcp_rl(
    target: Target, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Train an agent for a tool server with reinforcement learning only: the shortest form of
    `evolve`."""
    short: dict[str, Any] = {"rounds": 1, "new_tasks": 0, "demonstrations": {"source": "none"}}
    _evolve(target, overrides or [], resume, dry_run, **short)


def _evolve(target: str, overrides: list[str], resume: bool, dry_run: bool, **options: Any) -> None:
    import sys

    from agentevo.evolution.evolve import evolve as run
    from agentevo.evolution.evolve import last_run, read_evolution
    from agentevo.paths import short

    changes = [word for word in overrides if "=" in word]
    documents = [word for word in overrides if "=" not in word]
    evolution = read_evolution(target, changes, documents=documents, **options)
    if dry_run:
        _list(evolution)
        return

    run(evolution, resume=resume, note=lambda line: print(line, file=sys.stderr))
    last = last_run(evolution.folder)
    if last is not None:
        print(f"serve it: agentevo serve --openai {short(last)}")


def _list(evolution: Evolution) -> None:
    from agentevo.paths import short

    pipeline = evolution.check(print)
    tasks = evolution.section.tasks
    print(f"{short(evolution.folder)}: {tasks.train} tasks and {tasks.held_out} held out, then")
    print_table(
        (instance.id, "measures" if instance.measures is not None else instance.stage.kind)
        for instance in pipeline.plan.instances
    )
