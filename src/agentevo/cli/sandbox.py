"""`agentevo sandbox`: runs code in the sandboxes that a model's code gets."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Host, Port, Tls, plain_options, refuse_options
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.environments.sandbox import Execution
    from agentevo.environments.sandbox.section import SandboxSection

SERVE_OPTIONS = ("host", "port", "tls", "idle_s")


def sandbox(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|-|FOLDER",
            help="The code to run; - reads stdin. With --serve: the folder of the server's key.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...",
            help="Settings of the sandbox, such as type=landlock or memory_mib=256. With --serve: "
            "the kind, and the largest limits that clients can choose.",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Serve this machine's sandboxes to other machines, which use `type: remote` with "
            "the printed URL and key.",
        ),
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 0,
    tls: Tls = None,
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle-s",
            min=1.0,
            max=1e6,
            help="Seconds after which an unused sandbox of a server is closed.",
        ),
    ] = 3600.0,
) -> None:
    """Run a file in a sandbox for model-written code, or serve sandboxes to other machines. Exit
    code 1 if the code fails."""
    section = _section(settings or [])
    if not serve:
        refuse_options(context, "is for a server: add --serve", SERVE_OPTIONS)
        _run_file(source, section)
        return

    from agentevo.environments.sandbox.section import HERE
    from agentevo.runs.processes.sandbox_server import serve_sandboxes

    if section.type not in HERE:
        raise ConfigError(f"type={section.type}: a server has sandboxes of its own machine")
    folder = Path(source)
    serve_sandboxes(folder, section, host=host, port=port, tls=tls, idle_s=idle_s)


def _run_file(file: str, section: SandboxSection) -> None:
    from agentevo.environments.sandbox.open_sandbox import Sandboxes, chosen_kind
    from agentevo.runtime.console import print_line
    from agentevo.runtime.parsing import read_text

    code = sys.stdin.read() if file == "-" else read_text(Path(file))

    async def run() -> tuple[str, Execution]:
        async with Sandboxes(section).open() as opened:
            return await chosen_kind(section), await opened.run(code)

    kind, execution = asyncio.run(run())
    print_line(sys.stdout, execution.stdout, end="")
    print_line(sys.stderr, execution.stderr, end="")

    for line in _lines(kind, execution):
        print_line(sys.stderr, line)

    if execution.error is not None:
        raise typer.Exit(1)


def _lines(kind: str, execution: Execution) -> list[str]:
    error = execution.error
    lines = [] if execution.value is None else [f"value: {execution.value}"]
    if error is not None:
        lines.append(error.traceback.rstrip() or f"{error.type}: {error.message}")
    if execution.files:
        lines.append(f"files: {', '.join(execution.files)}")

    ending = "" if execution.is_alive else ", and the interpreter has ended"
    return [*lines, f"{kind}: {1000 * execution.duration_s:.0f} ms{ending}"]


def _section(settings: list[str]) -> SandboxSection:
    """Raises ConfigError."""
    import pydantic

    from agentevo.environments.sandbox.section import SandboxSection
    from agentevo.runtime.credentials import credential_problems

    options = plain_options(settings, "memory_mib=256")
    problems = credential_problems({"sandbox": options})
    if problems:
        raise ConfigError("\n".join(problems))

    try:
        return SandboxSection.model_validate(options)
    except pydantic.ValidationError as error:
        known_keys = ", ".join(SandboxSection.model_fields)
        problems = [
            f"{'.'.join(map(str, detail['loc'])) or 'sandbox'}: {detail['msg']} "
            f"(keys: {known_keys})"
            for detail in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from error
