"""A tool that searches a corpus: a file of passages (corpus.py), or a retriever behind HTTP.

The retriever's API is Search-R1's: POST {"queries": [...], "topk": 3, "return_scores": true} gives
{"result": [[{"document": {"contents": "TITLE\\nTEXT"}, "score": 1.5}, ...], ...]}; `agentevo
tools serve --search-r1` is one (agents/tool_servers/retriever.py).
"""

from __future__ import annotations

import os

import httpx

from agentevo.agents.tools.corpus import corpus_index, passage_of
from agentevo.config.tools import tool
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError
from agentevo.runtime.credentials import key_of
from agentevo.runtime.trace_header import trace_headers

TIMEOUT_S = 30.0


@tool("search")
class CorpusSearch:
    """Finds passages of a corpus: the option `corpus` is a file of them, or `url` a retriever."""

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        top_k: int = 3,
        kind: str = "bm25",
        model: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """`kind` and `model`: of the corpus's index. `api_key`: `${env:NAME}`, for a retriever.
        Raises ConfigError."""
        if (corpus is None) == (url is None):
            raise ConfigError("the tool search needs one of the options `corpus` and `url`")
        if url is not None and (kind, model) != ("bm25", None):
            raise ConfigError("the tool search: kind and model need a `corpus`: leave them out")
        if url is None and api_key is not None:
            raise ConfigError("the tool search: api_key needs a `url`: leave it out")

        self._url = url
        self._top_k = top_k
        self._key = key_of("the tool search: api_key", api_key)
        self._index = (
            None if corpus is None else corpus_index(os.path.expanduser(corpus), kind, model)
        )

    def search(self, query: str) -> str:
        """Finds passages that answer a question.

        Args:
            query: What is looked for, in a few words.
        """
        if self._index is None:
            passages = self._ask(query)
        else:
            passages = [passage.contents for passage, _ in self._index.find(query, self._top_k)]
        lines = [f"[{number}] {passage}" for number, passage in enumerate(passages, start=1)]
        return "\n".join(lines) or "Nothing was found."

    def _ask(self, query: str) -> list[str]:
        request = {"queries": [query], "topk": self._top_k, "return_scores": True}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= trace_headers()
        try:
            answer = httpx.post(str(self._url), json=request, headers=headers, timeout=TIMEOUT_S)
            answer.raise_for_status()
            (results,) = answer.json()["result"]
            return [passage_of(result.get("document", result)).contents for result in results]
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError)
            raise ToolUnavailableError(
                f"the retriever {self._url}: {error}", was_sent=sent
            ) from error
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolError(f"the retriever answers nonsense: {error}") from error
