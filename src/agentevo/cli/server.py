"""The command that trains models for programs on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def server(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the models are, one folder each.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: all, for other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    tls: Annotated[
        bool | None,
        typer.Option(
            help="Encrypt, with a certificate of its own. Default: unless --host is this machine."
        ),
    ] = None,
    max_models: Annotated[int, typer.Option(min=1, help="Models that may be open at once.")] = 1,
) -> None:
    """Trains models for programs on other machines, whose own loops submit what is trained on
    (agentevo.Client, docs/loop.md)."""
    from agentevo.loop.server import serve_loops

    serve_loops(folder, host=host, port=port, tls=tls, max_models=max_models)
