"""`agentevo tools`: the tools of a recipe or of a server, listed, called by hand, and served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import (
    Host,
    Port,
    check_arguments,
    plain_options,
    refuse_options,
)
from agentevo.cli.server_words import server_section
from agentevo.errors import ConfigError
from agentevo.runtime.console import without_controls

if TYPE_CHECKING:
    from agentevo.agents.tool_servers.serving import ToolServer
    from agentevo.config.tools import ToolSection
    from agentevo.types import Task, ToolCall

tools = typer.Typer(no_args_is_help=True, help="Inspect, test and serve tools.")
LONGEST = 500
"""Characters of a tested call's result that are printed."""


RETRIEVER_OPTIONS = ("corpus", "kind", "model", "top_k")


@tools.command("serve")
def serve(
    context: typer.Context,
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
    search_r1: Annotated[
        bool,
        typer.Option(
            "--search-r1",
            help="Serve the corpus of the tool search by Search-R1's API instead: POST /retrieve "
            "{queries, topk, return_scores}. Its options: corpus=FILE.jsonl, kind=bm25 (by words) "
            "or kind=dense (by meaning, pip install 'agentevo[dense]') with model=FOLDER, top_k=3.",
        ),
    ] = False,
    host: Host = "127.0.0.1",
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
    HTTP, where every session has its own state; or serve a corpus by Search-R1's API."""
    if search_r1:
        refuse_options(context, "is for MCP: leave it out", ("imports", "http", "timeout_s"))
        _serve_retriever(name, plain_options(options or [], "corpus=p.jsonl"), host, port, api_key)
        return

    from agentevo.agents.tool_servers.http_serving import listen, read_key
    from agentevo.observability.tracing.setup import traced_as_environment
    from agentevo.runtime.event_loop import run_coroutine

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
    from agentevo.agents.tool_servers.serving import ToolServer, own_task
    from agentevo.config.imports import KEY, import_all
    from agentevo.config.tools import FunctionToolSection, tools

    import_all({KEY: imports}, (), where="--import", folder=Path.cwd())
    prepare = getattr(tools.get(name), "_before_serving", None)
    task, seed = own_task()
    section = FunctionToolSection(name=name, options=plain_options(options), timeout_s=timeout_s)
    server = ToolServer(section, task, seed)

    if prepare is not None:
        prepare()

    return server


def _serve_retriever(
    name: str, options: dict[str, Any], host: str, port: int, api_key: str | None
) -> None:
    from agentevo.agents.tool_servers.http_serving import listen, read_key
    from agentevo.agents.tool_servers.retriever import MAX_TOP_K, Retriever
    from agentevo.agents.tools.corpus import corpus_index

    if name != "search":
        raise ConfigError(f"--search-r1: {name} has no corpus: serve the tool search")
    if unknown := sorted(options.keys() - set(RETRIEVER_OPTIONS)):
        raise ConfigError(f"{unknown[0]}: the options are {', '.join(RETRIEVER_OPTIONS)}")
    if "corpus" not in options:
        raise ConfigError("--search-r1 needs a corpus: write corpus=FILE.jsonl")

    top_k = options.get("top_k", 3)
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise ConfigError(f"top_k={top_k}: give a number of passages from 1 to {MAX_TOP_K}")

    key = read_key(api_key, host)
    corpus = str(Path(str(options["corpus"])))
    kind = str(options.get("kind", "bm25"))
    model = options.get("model")
    index = corpus_index(corpus, kind, None if model is None else str(model))
    app = Retriever(index, top_k=top_k, key=key)
    listen(app, host, port, what=f"{corpus} ({kind})", path="/retrieve", key=key)


@tools.command("inspect", context_settings={"ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|SERVER...",
            help="A recipe with its overrides, or a server: a URL (of a manager's node if it ends "
            "with /mcpapi), a file such as mcp_config.json, or a command with its arguments.",
        ),
    ],
    call: Annotated[
        str | None, typer.Option("--call", metavar="TOOL", help="Call this tool.")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar="JSON",
            help="The arguments of --call or --prompt, a JSON object. Default: none; with --test "
            "generated from the schema.",
        ),
    ] = None,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Call each tool once, or that of --call, with arguments generated from its "
            "schema, and print results, times and errors. The calls are real: use the toolset's "
            "`exclude` or --call for tools with side effects.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --test: print the calls without making them.")
    ] = False,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Print the complete JSON schema of each tool.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print this prompt of a server, filled with --arguments."
        ),
    ] = None,
    resource: Annotated[
        str | None, typer.Option(metavar="URI", help="Print this resource of a server.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='The task to send to a server, such as \'{"metadata": {"goal": 90}}\'.',
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="${env:NAME}", help="The API key for a server at a URL."),
    ] = None,
) -> None:
    """List the tools of a recipe or server as the policy sees them, with a server's prompts and
    resources; call a tool, or test all. Options come before SERVER. Exit code 1 if a call fails."""
    from agentevo.config.sources import recipe_names
    from agentevo.runtime.event_loop import run_coroutine

    if test:
        reason = "is not for a test: leave it out"
        refuse_options(context, reason, ("schemas", "prompt", "resource"))
    else:
        refuse_options(context, "prints the calls of a test: add --test", ("dry_run",))
    if sum(option is not None for option in (call, prompt, resource)) > 1:
        raise ConfigError("--call, --prompt and --resource: give one of them")
    if arguments is not None and call is None and prompt is None:
        raise ConfigError("--arguments are those of one tool: name it by --call")

    check_arguments(arguments or "{}")
    first = target[0]
    if first.endswith((".yaml", ".yml")) or first in recipe_names():
        reason = "is for a server: leave it out for a recipe"
        refuse_options(context, reason, ("prompt", "resource", "task", "api_key"))
        sections, session_task = _of_recipe(first, target[1:])
    else:
        section = server_section(target, api_key)
        sections, session_task = _of_server(section, task, prompt, arguments, resource)
        if resource is not None:
            call = "read_resource"
            arguments = json.dumps({"uri": resource})

    if test:
        if run_coroutine(_test_tools(sections, session_task, call, arguments, dry_run)):
            raise typer.Exit(1)
        return

    tool_call = None if call is None else (call, arguments or "{}")
    work = _read_tools(sections, session_task, tool_call, prompt is not None, schemas)
    lines, is_error = run_coroutine(work)
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

    from agentevo.runtime.parsing import ParseError, parse_json
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


async def _read_tools(
    sections: Sequence[ToolSection],
    task: Task,
    call: tuple[str, str] | None,
    wants_prompt: bool,
    schemas: bool,
) -> tuple[list[str], bool]:
    """What is printed, and whether the call has failed. `call`: the tool and its arguments."""
    from agentevo.agents.tools.toolbox import Toolbox
    from agentevo.types import ToolCall

    toolbox = Toolbox(sections)
    try:
        async with toolbox.open(task, seed=0) as tools:
            if wants_prompt:
                return [tools.instructions], False

            if call is not None:
                (result,) = await tools.call([ToolCall(*call)])
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


async def _test_tools(
    sections: Sequence[ToolSection],
    task: Task,
    call: str | None,
    arguments: str | None,
    dry_run: bool,
) -> int:
    """How many calls broke."""
    from agentevo.agents.tools.trial import try_calls
    from agentevo.types import ToolCall

    if dry_run or (call is not None and arguments is None):
        calls = await _make_calls(sections, task, call)
        if dry_run:
            for planned in calls:
                print(without_controls(f"{planned.name}({planned.arguments})"))
            return 0
    else:
        calls = [] if call is None else [ToolCall(call, str(arguments))]

    num_broken = 0
    async for tried_call in try_calls(sections, task, calls):
        num_broken += tried_call.status == "broken"
        text = tried_call.text[:LONGEST] + "..." * (len(tried_call.text) > LONGEST)
        made_call = without_controls(f"{tried_call.name}({tried_call.arguments})")
        print(f"{tried_call.status:<9}{made_call}  {tried_call.seconds:.2f} s", flush=True)
        lines = without_controls(text).splitlines()
        print("".join(f"    {line}\n" for line in lines), end="")

    return num_broken


async def _make_calls(
    sections: Sequence[ToolSection], task: Task, call: str | None
) -> list[ToolCall]:
    """The calls with arguments made from the schemas. Raises ConfigError for a tool that there is
    not."""
    from agentevo.agents.tools.toolbox import Toolbox
    from agentevo.agents.tools.trial import made_call
    from agentevo.runtime.registry import nearest

    toolbox = Toolbox(sections)
    try:
        async with toolbox.open(task, seed=0) as opened:
            calls_by_tool = {
                schema["function"]["name"]: made_call(schema) for schema in opened.schemas
            }
    finally:
        await toolbox.close()

    if call is not None and call not in calls_by_tool:
        guess = nearest(call, list(calls_by_tool))
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"--call: there is no tool {call!r}: {hint}tools: {', '.join(calls_by_tool)}"
        )

    return list(calls_by_tool.values()) if call is None else [calls_by_tool[call]]


def _of_server(
    section: ToolSection,
    task: str | None,
    prompt: str | None,
    arguments: str | None,
    resource: str | None,
) -> tuple[Sequence[ToolSection], Task]:
    """The tools of a server, with its prompt or resources if one is asked for, and the task of the
    session. Raises ConfigError."""
    session_task = _task(task)
    if task is not None:
        section = _with(section, send_task=True)
    if prompt is not None:
        section = _with(section, prompt=prompt, prompt_arguments=_texts(arguments or "{}"))
    if resource is not None:
        section = _with(section, resources=True)

    return [section], session_task


def _of_recipe(recipe: str, overrides: list[str]) -> tuple[Sequence[ToolSection], Task]:
    """The tools of a recipe, and its first task. Raises ConfigError."""
    from agentevo.config import load_config
    from agentevo.rollout.given_tasks import read_tasks
    from agentevo.types import Task

    config = load_config(recipe, overrides, needs_environment=False)
    sections = getattr(config.agent, "tools", ())
    if not sections:
        raise ConfigError(
            f"{recipe}: agent.type={config.agent.type} has no tools: give a recipe whose "
            "agent.tools lists some"
        )

    tasks = read_tasks(config.tasks, config.agent).train if config.tasks.train else []
    return sections, tasks[0] if tasks else Task(id="test")
