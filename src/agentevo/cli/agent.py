"""`agentevo agent`: an agent by hand."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agentevo.cli.arguments import Overrides

agent = typer.Typer(no_args_is_help=True, help="Try an agent by hand.")


@agent.callback()
def _group() -> None: ...


@agent.command("try")
def try_agent(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN|MODEL",
            help="The model, written like the target of `agentevo eval`.",
        ),
    ],
    overrides: Overrides = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The query. Default: one of the recipe's held-out tasks."
        ),
    ] = None,
    answer: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The correct answer, for the rewards.")
    ] = None,
    number: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="The index of the held-out task; with --task, its seed."
        ),
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
) -> None:
    """Run one attempt in the terminal and print each call as it happens: prompts, replies, tools,
    code, results, reward. Exit code 1 if it fails."""
    from agentevo.evaluation.attempt import try_attempt

    trajectory = try_attempt(
        target,
        overrides or [],
        text=task,
        answer=answer,
        number=number,
        temperature=temperature,
        show=lambda line: print(line, flush=True),
        note=lambda line: print(line, file=sys.stderr),
    )
    if trajectory.status != "completed":
        raise typer.Exit(1)
