"""`agentevo mcp`: what an MCP server has, and a call of it by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.tools.tool import ToolResult

mcp = typer.Typer(no_args_is_help=True, help="Servers of the Model Context Protocol.")


@mcp.command("inspect", context_settings={"ignore_unknown_options": True})
def inspect(
    server: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER...",
            help="A URL (of a manager's node, where it ends with /mcpapi), a file such as "
            "mcp_config.json, or a command with its arguments.",
        ),
    ],
    call: Annotated[
        str | None, typer.Option("--call", metavar="TOOL", help="Call this tool; name it first.")
    ] = None,
    arguments: Annotated[
        str, typer.Option("--arguments", metavar="JSON", help="The call's arguments, an object.")
    ] = "{}",
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Print the whole schema of each tool, as JSON.")
    ] = False,
) -> None:
    """List a server's tools as the policy gets them, or call one. Options come before SERVER. Exit
    code 1 if the call has failed."""
    from agentevo.event_loop import run_coroutine

    section = _section(server)
    found, result = run_coroutine(_asked(section, call, arguments))
    if result is not None:
        print(result.text)
        if result.is_error:
            raise typer.Exit(1)
        return
    for schema in found:
        function = schema["function"]
        if schemas:
            print(json.dumps(schema, ensure_ascii=False))
            continue
        about = " ".join(function["description"].split())
        print(f"{function['name']}({', '.join(_parameters(function['parameters']))})  {about}")


async def _asked(
    section: ToolSection, call: str | None, arguments: str
) -> tuple[list[dict[str, Any]], ToolResult | None]:
    from agentevo.tools.toolbox import Toolbox
    from agentevo.types import Task, ToolCall

    toolbox = Toolbox([section])
    try:
        async with toolbox.open(Task(id="inspect"), seed=0) as tools:
            if call is None:
                return tools.schemas, None
            (result,) = await tools.call([ToolCall(call, arguments)])
            return tools.schemas, result
    finally:
        await toolbox.close()


def _section(words: list[str]) -> ToolSection:
    """Raises ConfigError."""
    from pathlib import Path

    import pydantic

    from agentevo.config.mcp import MCPFileSection, MCPServerSection
    from agentevo.config.mcp_manager import PATH, MCPManagerSection

    first = words[0]
    try:
        if "://" in first and first.rstrip("/").endswith(PATH):
            return MCPManagerSection(url=first)
        if "://" in first:
            is_sse = first.rstrip("/").endswith("/sse")
            return MCPServerSection(name="server", url=first, transport="sse" if is_sse else "http")
        if len(words) == 1 and first.endswith(".json"):
            return MCPFileSection(file=Path(first))
        return MCPServerSection(name="server", command=first, args=tuple(words[1:]))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{first}: {error.errors()[0]['msg']}") from error


def _parameters(schema: dict[str, Any]) -> list[str]:
    """Their names and types; optional ones with a question mark."""
    needed = schema.get("required") or ()
    return [
        f"{name}{'' if name in needed else '?'}: {_type(one)}"
        for name, one in (schema.get("properties") or {}).items()
    ]


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    choices = schema.get("enum")
    if isinstance(choices, list):
        return " | ".join(json.dumps(one) for one in choices)
    kind = schema.get("type")
    return "any" if kind is None else kind if isinstance(kind, str) else " | ".join(map(str, kind))
