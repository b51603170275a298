"""`agentevo chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agentevo.cli.arguments import Overrides


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run (its newest checkpoint; RUN@best for its best), or a model: a folder, a "
            "known name, a Hub name.",
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
            help="Sampling temperature; 0 is greedy. Default: the recipe's sampling.temperature.",
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
) -> None:
    """Chat with a run's model or another model. Ctrl-C ends an answer, Ctrl-D ends the chat. Each
    line from a pipe gets one answer."""
    from agentevo.evaluation.chat import chat as run_chat

    run_chat(
        target,
        overrides or [],
        step=step,
        system=system,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        note=lambda line: print(line, file=sys.stderr),
    )
