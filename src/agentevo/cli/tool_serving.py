"""`agentevo tools serve`: tools as an MCP server, or a corpus behind Search-R1's API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Host, Port, path_word, plain_options, refuse_options
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.agents.tool_servers.serving import ToolServer

RETRIEVER_OPTIONS = ("corpus", "kind", "model", "top_k")


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
    from agentevo.observability.tracing.environment import traced_as_environment
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
    corpus = str(path_word(str(options["corpus"])))
    kind = str(options.get("kind", "bm25"))
    model = options.get("model")
    index = corpus_index(corpus, kind, None if model is None else str(model))
    app = Retriever(index, top_k=top_k, key=key)
    listen(app, host, port, what=f"{corpus} ({kind})", path="/retrieve", key=key)
