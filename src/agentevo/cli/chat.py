"""`agentevo chat`: a conversation with a model in the terminal, or one attempt at a task."""

from __future__ import annotations

from typing import Annotated

import typer

from agentevo.cli.arguments import Overrides
from agentevo.cli.printing import print_note
from agentevo.errors import ConfigError


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL|RECIPE",
            help="A run (its newest checkpoint; RUN@best for its best), a model (a folder, a "
            "known name, a Hub name), or a recipe's untrained model.",
        ),
    ],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The step of the run's checkpoint.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The system message. Default: agent.system_prompt."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Sampling temperature; 0 is greedy. Default: the recipe's sampling.temperature; "
            "0 for a task.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The most tokens of an answer. Default: the recipe's, at least 512.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Instead, the agent makes one attempt at this task, and each call is printed.",
        ),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --task: the correct answer, for the rewards."),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Instead, one attempt at the held-out task of this index; with --task, the seed.",
        ),
    ] = None,
) -> None:
    """Chat with a run's model or another model, or watch its agent make one attempt at a task.
    Ctrl-C ends an answer, Ctrl-D the chat. Each line from a pipe gets one answer. Exit code 1 if
    the attempt fails."""
    if task is None and number is None:
        if answer is not None:
            raise ConfigError("--answer is for one attempt at a task: add --task")

        from agentevo.runs.evaluation.chat import chat as run_chat

        run_chat(
            target,
            overrides or [],
            step=step,
            system=system,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            note=print_note,
        )
        return

    if system is not None or max_new_tokens is not None:
        raise ConfigError(
            "--system and --max-new-tokens are for a conversation: for an attempt at a task, set "
            "agent.system_prompt=TEXT and sampling.max_new_tokens=N"
        )

    from agentevo.runs.evaluation.attempt import try_attempt

    trajectory = try_attempt(
        target,
        overrides or [],
        step=step,
        text=task,
        answer=answer,
        number=number or 0,
        temperature=temperature or 0.0,
        show=lambda line: print(line, flush=True),
        note=print_note,
    )
    if trajectory.status != "completed":
        raise typer.Exit(1)
