"""The command that trains models for programs on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def server(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of the models, one subfolder each.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="The address to listen on. 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port. 0 chooses a free one.")
    ] = 0,
    tls: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Encrypt with a self-signed certificate. Default: on, unless --host is this "
                "machine."
            )
        ),
    ] = None,
    max_models: Annotated[
        int, typer.Option(min=1, help="The most models that can be open at the same time.")
    ] = 1,
) -> None:
    """Serve training to programs on other machines that run their own loop with agentevo.Client
    (docs/loop.md)."""
    from agentevo.api.loop.server import serve_loops

    serve_loops(folder, host=host, port=port, tls=tls, max_models=max_models)
