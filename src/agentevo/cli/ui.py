"""The command that shows runs in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from agentevo.cli.arguments import Port


def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUNS|STORE_URL]...",
            help="Folders of runs or sweeps, folders that hold some, or URLs of stores. Default: "
            "runs.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: all, for other machines.")
    ] = "127.0.0.1",
    port: Port = 0,
    tls: Annotated[
        bool | None,
        typer.Option(
            help="Encrypt, with a certificate of its own. Default: unless --host is this machine."
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Print a second URL: whoever opens it may try checkpoints, and ask runs to stop, "
            "save, pause or resume. Default: it only reads.",
        ),
    ] = False,
    nice: Annotated[
        int,
        typer.Option(
            min=0,
            max=19,
            help="Lower its own priority by this much, so that it yields to training on this "
            "machine; 0 leaves it.",
        ),
    ] = 10,
) -> None:
    """Show runs in a browser, live: curves, comparisons, every attempt. It only reads, unless
    --control is given, and prints the URL to open."""
    from agentevo.ui.server import serve_dashboard

    serve_dashboard(runs or [], host=host, port=port, tls=tls, control=control, nice=nice)
