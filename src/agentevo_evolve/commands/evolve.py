"""`agentevo evolve`: from a server of tools, or documents, to a better agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, Resume
from agentevo.cli.printing import print_note, print_table

if TYPE_CHECKING:
    from agentevo_evolve.evolution.evolve import Evolution

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


RlOnly = Annotated[
    bool,
    typer.Option(
        "--rl-only",
        help="One round of reinforcement learning only: no demonstrations and no harder tasks.",
    ),
]


def evolve(
    target: Target,
    overrides: Overrides = None,
    rl_only: RlOnly = False,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Train an agent for a tool server or for documents: make tasks, demonstrate, fine-tune, learn
    from reward, and repeat with harder tasks (docs/evolve.md). This calls the server's tools."""

    from agentevo.runtime.paths import short
    from agentevo_evolve.evolution.evolve import evolve as run
    from agentevo_evolve.evolution.evolve import last_run, read_evolution

    changes = [word for word in overrides or () if "=" in word]
    documents = [word for word in overrides or () if "=" not in word]
    section_keys: dict[str, Any] = {}
    if rl_only:
        section_keys = {"rounds": 1, "new_tasks": 0, "demonstrations": {"source": "none"}}

    evolution = read_evolution(target, changes, documents=documents, **section_keys)
    if dry_run:
        _list(evolution)
        return

    run(evolution, resume=resume, note=print_note)
    last = last_run(evolution.folder)
    if last is not None:
        print(f"serve it: agentevo serve --openai {short(last)}")


def _list(evolution: Evolution) -> None:
    from agentevo.runtime.paths import short

    pipeline = evolution.check(print)
    tasks = evolution.section.tasks
    print(f"{short(evolution.folder)}: {tasks.train} tasks and {tasks.held_out} held out, then")
    print_table(
        (instance.id, "measures" if instance.measures is not None else instance.stage.kind)
        for instance in pipeline.plan.instances
    )
