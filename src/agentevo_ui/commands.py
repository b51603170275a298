"""The command that shows runs in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from agentevo.cli.arguments import Host, Port, Tls
from agentevo.cli.topics import Topic


def add_commands(app: typer.Typer) -> None:
    """Adds `agentevo ui`."""
    app.command(rich_help_panel=Topic.START)(ui)


def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUNS|STORE_URL]...",
            help="Folders of runs or sweeps, their parent folders, or URLs of stores. Default: "
            "runs.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    tls: Tls = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Also print a URL that allows trying checkpoints and stopping, saving, pausing "
            "and resuming runs. By default the dashboard only reads.",
        ),
    ] = False,
    nice: Annotated[
        int,
        typer.Option(
            min=0,
            max=19,
            help="Lower the process priority by this much, so that training on this machine comes "
            "first; 0 keeps it.",
        ),
    ] = 10,
) -> None:
    """Show runs in the browser: live curves, comparisons, and every attempt. Prints the URL to
    open."""
    from agentevo_ui.server import serve_dashboard

    serve_dashboard(runs or [], host=host, port=port, tls=tls, control=control, nice=nice)
