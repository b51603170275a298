"""`agentevo mcp`: what an MCP server has, a call of it by hand, and tools as a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Port, check_arguments
from agentevo.cli.server_words import server_section
from agentevo.console import without_controls
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.tool_servers.serving import ToolServer
    from agentevo.types import Task

mcp = typer.Typer(no_args_is_help=True, help="Inspect and serve MCP servers.")


@mcp.command("inspect", context_settings={"ignore_unknown_options": True})
def inspect(
    server: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER...",
            help="A URL (of a manager's node if it ends with /mcpapi), a file such as "
            "mcp_config.json, or a command with its arguments.",
        ),
    ],
    call: Annotated[
        str | None, typer.Option("--call", metavar="TOOL", help="Call this tool.")
    ] = None,
    arguments: Annotated[
        str,
        typer.Option("--arguments", metavar="JSON", help="The call's arguments, a JSON object."),
    ] = "{}",
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Print the complete JSON schema of each tool.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print this prompt, filled with --arguments.")
    ] = None,
    resource: Annotated[
        str | None, typer.Option(metavar="URI", help="Print this resource.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help=('The task to send to the server, such as \'{"metadata": {"goal": 90}}\'.'),
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="${env:NAME}", help="The API key for a server at a URL."),
    ] = None,
) -> None:
    """List a server's tools as the policy sees them, its prompts and resources; call a tool; or
    print a prompt or resource. Options come before SERVER. Exit code 1 if the call fails."""
    from agentevo.event_loop import run_coroutine

    if sum(option is not None for option in (call, prompt, resource)) > 1:
        raise ConfigError("--call, --prompt and --resource: give one of them")

    check_arguments(arguments)
    section = server_section(server, api_key)
    if prompt is not None:
        section = _with(section, prompt=prompt, prompt_arguments=_texts(arguments))

    if resource is not None:
        call = "read_resource"
        arguments = json.dumps({"uri": resource})
        section = _with(section, resources=True)

    session_task = _task(task)
    if task is not None:
        section = _with(section, send_task=True)

    lines, is_error = run_coroutine(
        _call_server(section, session_task, call, arguments, prompt is not None, schemas)
    )
    for line in lines:
        print(without_controls(line))

    if is_error:
        raise typer.Exit(1)


def _texts(arguments: str) -> dict[str, str]:
    """Arguments of a prompt. Raises ConfigError."""
    fields = check_arguments(arguments)
    if not all(isinstance(value, str) for value in fields.values()):
        raise ConfigError("--arguments: those of a prompt are an object of texts")
    return fields


def _task(text: str | None) -> Task:
    """The task of the session. Raises ConfigError."""
    import msgspec

    from agentevo.parsing import ParseError, parse_json
    from agentevo.types import Task

    if text is None:
        return Task(id="inspect")

    try:
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise ConfigError('--task: a task is an object, such as {"query": ..., "answer": 90}')
        if unknown := [key for key in fields if key not in Task.__struct_fields__]:
            field_names = ", ".join(Task.__struct_fields__)
            raise ConfigError(f"--task: a task has no {unknown[0]!r}: it has {field_names}")
        if "answer" in fields:
            raise ConfigError(
                "--task: the server does not receive the answer: give the data it needs as "
                "`metadata`"
            )
        return msgspec.convert({"id": "inspect", **fields}, Task)
    except (ParseError, msgspec.ValidationError) as error:
        raise ConfigError(f"--task: {error}") from error


def _with(section: ToolSection, **changes: Any) -> ToolSection:
    """Raises ConfigError for a server that has no such things."""
    if not set(changes) <= set(type(section).model_fields):
        raise ConfigError("a manager has no prompts, resources and tasks: give one of its servers")
    return section.model_copy(update=changes)


@mcp.command("serve")
def serve(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="booking, calculator, database, files, search, or a tool that --import registers.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...", help="The tool's options, such as corpus=p.jsonl."
        ),
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="A module or file that registers tools."),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Use streamable HTTP instead of stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = "127.0.0.1",
    port: Port = 0,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="${env:NAME}", help="The bearer token that clients must send."
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", min=0.001, max=86_400, help="The time limit of a call, in seconds."
        ),
    ] = 60.0,
) -> None:
    """Serve tools as an MCP server, over stdin and stdout (the task is in AGENTEVO_TASK) or over
    HTTP, where every session has its own state."""
    from agentevo.event_loop import run_coroutine
    from agentevo.tool_servers.listening import listen, read_key
    from agentevo.tracing.environment import traced_as_environment

    if not http and (port or api_key or host != "127.0.0.1"):
        raise ConfigError("--host, --port and --api-key are for --http: add it, or leave them out")

    key = read_key(api_key, host) if http else None
    server = _tool_server(name, options or [], imports or [], timeout_s)
    run_coroutine(server.check())

    with traced_as_environment():
        if not http:
            run_coroutine(server.serve_stdio())
            return
        listen(server.app(host, key), host, port, what=f"the tools {name}", path="/mcp", key=key)


def _tool_server(name: str, options: list[str], imports: list[str], timeout_s: float) -> ToolServer:
    """Raises ConfigError."""
    from pathlib import Path

    from agentevo.cli.arguments import plain_options
    from agentevo.config.imports import KEY, import_all
    from agentevo.config.tools import FunctionToolSection, tools
    from agentevo.tool_servers.serving import ToolServer, own_task

    import_all({KEY: imports}, (), where="--import", folder=Path.cwd())
    prepare = getattr(tools.get(name), "_before_serving", None)
    task, seed = own_task()
    section = FunctionToolSection(name=name, options=plain_options(options), timeout_s=timeout_s)
    server = ToolServer(section, task, seed)

    if prepare is not None:
        prepare()

    return server


async def _call_server(
    section: ToolSection,
    task: Task,
    call: str | None,
    arguments: str,
    wants_prompt: bool,
    schemas: bool,
) -> tuple[list[str], bool]:
    """What is printed, and whether a call has failed."""
    from agentevo.tools.toolbox import Toolbox
    from agentevo.types import ToolCall

    toolbox = Toolbox([section])
    try:
        async with toolbox.open(task, seed=0) as tools:
            if wants_prompt:
                return [tools.instructions], False

            if call is not None:
                (result,) = await tools.call([ToolCall(call, arguments)])
                return [result.text], result.is_error

            if schemas:
                return [json.dumps(schema, ensure_ascii=False) for schema in tools.schemas], False

            prompts, resources = await tools.offers()
            lines = [_line(schema["function"]) for schema in tools.schemas]
            lines += [f"prompt {prompt}" for prompt in prompts]
            return lines + [f"resource {resource}" for resource in resources], False
    finally:
        await toolbox.close()


def _line(function: dict[str, Any]) -> str:
    about = " ".join(function["description"].split())
    return f"{function['name']}({', '.join(_parameters(function['parameters']))})  {about}"


def _parameters(schema: dict[str, Any]) -> list[str]:
    """Their names and types; optional ones with a question mark."""
    needed = schema.get("required") or ()
    return [
        f"{name}{'' if name in needed else '?'}: {_type(property_schema)}"
        for name, property_schema in (schema.get("properties") or {}).items()
    ]


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    choices = schema.get("enum")
    if isinstance(choices, list):
        return " | ".join(json.dumps(choice) for choice in choices)
    kind = schema.get("type")
    return "any" if kind is None else kind if isinstance(kind, str) else " | ".join(map(str, kind))
