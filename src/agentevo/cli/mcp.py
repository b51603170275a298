"""`agentevo mcp`: what an MCP server has, a call of it by hand, and tools as a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Port
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.tool_servers.serving import ToolServer
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


@mcp.command("serve")
def serve(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="booking, calculator, database, files, search, or a tool of your own that "
            "--import registers.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Its options, such as corpus=p.jsonl."),
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Module or file that registers tools of your own."
        ),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Streamable HTTP instead of stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on, with --http.")] = "127.0.0.1",
    port: Port = 0,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="${env:NAME}", help="Key that clients show as a bearer token."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.001, max=86_400, help="Longest time of a call.")
    ] = 60.0,
) -> None:
    """Serve tools as an MCP server, for any client: over stdin and stdout, where it has the task of
    AGENTEVO_TASK, or over HTTP, where every session has a state of its own."""
    from agentevo.event_loop import run_coroutine
    from agentevo.tool_servers.listening import listen, read_key

    if not http and (port or api_key or host != "127.0.0.1"):
        raise ConfigError("--host, --port and --api-key are for --http: add it, or leave them out")
    key = read_key(api_key, host) if http else None
    server = _tool_server(name, options or [], imports or [], timeout_s)
    if not http:
        run_coroutine(server.serve_stdio())
        return
    listen(server.app(host, key), host, port, what=f"the tools {name}", path="/mcp")


def _tool_server(name: str, options: list[str], imports: list[str], timeout_s: float) -> ToolServer:
    """Raises ConfigError."""
    from pathlib import Path

    from agentevo.cli.arguments import plain_options
    from agentevo.config.imports import KEY, import_all
    from agentevo.config.tools import FunctionToolSection, tools
    from agentevo.tool_servers import search as search
    from agentevo.tool_servers.serving import ToolServer, own_task

    import_all({KEY: imports}, (), where="--import", folder=Path.cwd())
    prepare = getattr(tools.get(name), "_before_serving", None)
    task, seed = own_task()
    section = FunctionToolSection(name=name, options=plain_options(options), timeout_s=timeout_s)
    server = ToolServer(section, task, seed)
    if prepare is not None:
        prepare()
    return server


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
