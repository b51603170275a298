"""`agentevo retriever`: a corpus behind Search-R1's HTTP API."""

from __future__ import annotations

from typing import Annotated

import typer

from agentevo.cli.arguments import Port, path_word


def retriever(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS.jsonl",
            help="The passages: one JSON object per line, with title and text.",
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="bm25 searches by words, dense by meaning (pip install 'agentevo[dense]')."
        ),
    ] = "bm25",
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="For dense: a transformers encoder. Default: MiniLM."),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", min=1, max=100, help="The number of passages if a request does not set it."
        ),
    ] = 3,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="${env:NAME}", help="The bearer token that clients must send."
        ),
    ] = None,
) -> None:
    """Serve a search index with Search-R1's API: POST /retrieve {queries, topk, return_scores}."""
    from agentevo.tool_servers.listening import listen, read_key
    from agentevo.tool_servers.retriever import Retriever
    from agentevo.tools.indexes import corpus_index

    key = read_key(api_key, host)
    path_word(corpus)
    index = corpus_index(corpus, kind, model)
    app = Retriever(index, top_k=top_k, key=key)
    listen(app, host, port, what=f"{corpus} ({kind})", path="/retrieve", key=key)
