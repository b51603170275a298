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
            help="A run, for its newest checkpoint (RUN@best for its best one), or a model: a "
            "folder, a known name, a hub name.",
        ),
    ],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which checkpoint of the run.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message. Default: agent.system_prompt."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy. Default: sampling.temperature of the recipe."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest answer, in tokens. Default: 512 at least."),
    ] = None,
) -> None:
    """Chat with what a run has trained, or with a model. Answers appear as they are drawn; Ctrl-C
    ends an answer, Ctrl-D the chat. From a pipe each line gets one answer."""
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
