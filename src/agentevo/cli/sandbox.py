"""`agentevo sandbox`: code run as a model's would be."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import path_word, plain_options
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.sandbox import SandboxSection
    from agentevo.sandbox import Execution

sandbox = typer.Typer(no_args_is_help=True, help="Sandboxes, where code of a model runs.")


@sandbox.command("try")
def try_file(
    file: Annotated[str, typer.Argument(metavar="FILE.py|-", help="Code to run; - reads stdin.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...",
            help="Keys of the sandbox, such as type=landlock or memory_mib=256.",
        ),
    ] = None,
) -> None:
    """Run a file in a sandbox, and print what became of it. Exit code 1 if the code has failed."""
    from agentevo.observability.live import print_line
    from agentevo.parsing import read_text
    from agentevo.sandbox.opening import Sandboxes, chosen_kind

    section = _section(settings or [])
    code = sys.stdin.read() if file == "-" else read_text(path_word(file))

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
    lost = "" if execution.is_alive else ", and the interpreter has ended"
    return [*lines, f"{kind}: {1000 * execution.duration_s:.0f} ms{lost}"]


def _section(settings: list[str]) -> SandboxSection:
    """Raises ConfigError."""
    import pydantic

    from agentevo.config.sandbox import SandboxSection

    try:
        return SandboxSection.model_validate(plain_options(settings, "memory_mib=256"))
    except pydantic.ValidationError as error:
        known = ", ".join(SandboxSection.model_fields)
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'sandbox'}: {one['msg']} (keys: {known})"
            for one in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from error
