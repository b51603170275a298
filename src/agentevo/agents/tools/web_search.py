"""A tool that searches the web through an API of the user's choice: one of APIS by name, or any
JSON API, described by the fields of `WebSearchApi`.

The formats follow the providers' documentation: SearXNG's JSON format, Brave's Web Search, Serper's
and Tavily's search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx
import pydantic

from agentevo.agents.tools.web_hosts import ENCODING, WebHosts, read_content, timed_requests
from agentevo.config.tools import tool
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError
from agentevo.runtime.credentials import key_of
from agentevo.runtime.http_clients import trusted_context

TIMEOUT_S = 30.0
MAX_ANSWER = 4_000_000
"""The maximum number of bytes of an API's answer."""
MAX_QUERY = 1000
"""The maximum number of characters of a query."""


class WebSearchApi(pydantic.BaseModel):
    """The form of an API's requests and answers."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = pydantic.Field(default="", pattern=r"^(https?://\S+)?$")
    method: Literal["GET", "POST"] = "GET"
    """GET: parameters of the URL; POST: a JSON object."""
    query: str = "q"
    """The parameter that holds the query."""
    count: str | None = None
    """The parameter for the number of results."""
    parameters: Mapping[str, pydantic.JsonValue] = {}
    """Other parameters, with constant values."""
    key_header: str | None = None
    """The header that holds the key; Authorization gets it after `Bearer`."""
    results: str = "results"
    """The path of the list of results: keys with dots between them."""
    title: str = "title"
    link: str = "url"
    text: str = "content"
    """Keys of a result."""


APIS: Mapping[str, WebSearchApi] = {
    "searxng": WebSearchApi(parameters={"format": "json"}),
    "brave": WebSearchApi(
        url="https://api.search.brave.com/res/v1/web/search",
        count="count",
        key_header="X-Subscription-Token",
        results="web.results",
        text="description",
    ),
    "serper": WebSearchApi(
        url="https://google.serper.dev/search",
        method="POST",
        count="num",
        key_header="X-API-KEY",
        results="organic",
        link="link",
        text="snippet",
    ),
    "tavily": WebSearchApi(
        url="https://api.tavily.com/search",
        method="POST",
        query="query",
        count="max_results",
        key_header="Authorization",
    ),
}


@tool("web_search")
class WebSearch:
    """Finds pages of the web."""

    def __init__(
        self,
        api: str | dict[str, Any],
        url: str | None = None,
        api_key: str | None = None,
        top_k: int = 5,
        allow: Sequence[str] = ("*",),
        deny: Sequence[str] = (),
    ) -> None:
        """`api`: a name from APIS, or the fields of a WebSearchApi. `url`: replaces the API's URL.
        `api_key`: `${env:NAME}`. Results from hosts that `allow` and `deny` exclude are not shown
        (web_hosts.py). Raises ConfigError."""
        self._api = _api(api, url)
        self._key = key_of("the tool web_search: api_key", api_key)
        if self._api.key_header is not None and self._key is None:
            raise ConfigError(
                f"the tool web_search: {self._api.url} needs a key: set api_key to ${{env:NAME}}"
            )
        if self._key is not None and self._api.key_header is None:
            raise ConfigError(
                "the tool web_search: api_key has no header: give key_header in api, or leave the "
                "key out"
            )

        self._top_k = top_k
        self._hosts = WebHosts(allow, deny)

    def web_search(self, query: str) -> str:
        """Searches the web. Each result has a title, an address and some of its text.

        Args:
            query: What is looked for, in a few words.
        """
        answer = self._ask(query[:MAX_QUERY])
        for key in filter(None, self._api.results.split(".")):
            answer = answer.get(key) if isinstance(answer, dict) else None
        if answer is None:
            return "Nothing was found."
        if not isinstance(answer, list):
            raise ToolError(f"the search API's answer has no list at {self._api.results!r}")

        results = [
            result for result in answer if isinstance(result, dict) and self._is_shown(result)
        ]
        lines = [
            f"[{number}] {self._of(result, self._api.title)}\n{self._of(result, self._api.link)}\n"
            f"{self._of(result, self._api.text)}".strip()
            for number, result in enumerate(results[: self._top_k], start=1)
        ]
        return "\n\n".join(lines) or "Nothing was found."

    def _is_shown(self, result: Mapping[str, Any]) -> bool:
        return self._hosts.allows(self._of(result, self._api.link))

    def _of(self, result: Mapping[str, Any], key: str) -> str:
        value = result.get(key)
        return " ".join(str(value).split()) if value is not None else ""

    def _ask(self, query: str) -> Any:
        api = self._api
        parameters: dict[str, Any] = {**api.parameters, api.query: query}
        if api.count is not None:
            parameters[api.count] = self._top_k

        headers = {"Accept": "application/json", "Accept-Encoding": ENCODING}
        if api.key_header is not None and self._key is not None:
            bearer = "Bearer " if api.key_header.lower() == "authorization" else ""
            headers[api.key_header] = f"{bearer}{self._key}"

        how: dict[str, Any] = (
            {"params": parameters} if api.method == "GET" else {"json": parameters}
        )
        try:
            with (
                httpx.Client(verify=trusted_context()) as client,
                timed_requests(TIMEOUT_S) as requests,
                requests.stream(client, api.method, api.url, headers=headers, **how) as answer,
            ):
                if answer.status_code in (401, 403):
                    raise ToolUnavailableError(
                        f"the search API {api.url} answers {answer.status_code}: see api_key"
                    )
                if not answer.is_success:
                    raise ToolError(f"the search API answers {answer.status_code}")
                content = read_content(answer, "the search API", MAX_ANSWER)
            return json.loads(content)
        except TimeoutError as error:
            raise ToolUnavailableError(
                f"the search API {api.url} has not answered within {TIMEOUT_S:g} s", was_sent=True
            ) from error
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError)
            raise ToolUnavailableError(
                f"the search API {api.url}: {error}", was_sent=sent
            ) from error
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise ToolError(f"the search API answers nonsense: {error}") from error


def _api(option: str | dict[str, Any], url: str | None) -> WebSearchApi:
    """Raises ConfigError."""
    if isinstance(option, str):
        if option not in APIS:
            raise ConfigError(
                f"the tool web_search: api={option!r} is not known: choose one of "
                f"{', '.join(APIS)}, or describe yours: {{url: ..., query: q, results: results}}"
            )
        fields = APIS[option].model_dump()
    else:
        fields = dict(option)

    try:
        api = WebSearchApi.model_validate(fields | ({} if url is None else {"url": url}))
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"the tool web_search: api.{place}: {wrong['msg']}") from error

    if not api.url:
        raise ConfigError("the tool web_search: url is missing: give the URL of your server")
    return api
