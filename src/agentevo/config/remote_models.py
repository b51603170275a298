"""The section `remote_models`: models behind another party's HTTP API, by the name under which
agents and clients call them. They answer and are never trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentevo.config.field_words import suggest_nearest
from agentevo.config.section import Section
from agentevo.credentials import REFERENCE
from agentevo.device_names import DeviceName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,99}")
DEFAULT_URLS = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "engine": "engine:",
}


_OWN_FIELDS = {
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
}
"""Fields of a request that are not `extra`."""


class PriceSection(Section):
    """What a remote model costs, in one currency for the whole recipe, per million tokens."""

    prompt: float = Field(default=0.0, ge=0)
    """Price of a million tokens of prompts."""
    cached: float | None = Field(default=None, ge=0)
    """Price of a million tokens of prompts that the server had already. Default: the price of the
    others."""
    completion: float = Field(default=0.0, ge=0)
    """Price of a million tokens of answers."""

    def of(self, prompt: int, cached: int, completion: int) -> float:
        """The cost of that many tokens; `cached` of the prompt's tokens were in the server's
        cache."""
        per_cached = self.prompt if self.cached is None else self.cached
        prompt_price = (prompt - cached) * self.prompt + cached * per_cached
        return (prompt_price + completion * self.completion) / 1e6


class BudgetSection(Section):
    """What a run may use of a remote model, all of its processes and resumptions together. A call
    that might go beyond it is not made."""

    requests: int | None = Field(default=None, ge=1)
    """Most requests, repeated ones among them."""
    tokens: int | None = Field(default=None, ge=1)
    """Most tokens, of prompts and answers together."""
    cost: float | None = Field(default=None, gt=0)
    """Most money, in the currency of `price`."""

    @property
    def limits(self) -> bool:
        return (self.requests, self.tokens, self.cost) != (None, None, None)


class RemoteModelSection(Section):
    """One remote model."""

    api: Literal["openai", "anthropic", "engine"] = "openai"
    """Which API the server has: OpenAI's chat completions (vLLM, SGLang, Ollama and most others
    have it, too), or Anthropic's messages. `engine`: there is no server, the model is computed in
    each process that asks it."""
    base_url: str = ""
    """Where the server is, such as http://127.0.0.1:8000/v1. Default: the API's own."""
    model: str = Field(min_length=1)
    """What the server calls the model. With `api: engine` as in model.name: a folder, a run for its
    best checkpoint, or a known model; it is greedy where `temperature` is null."""
    device: DeviceName = "auto"
    """With `api: engine`: what computes, as model.device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """With `api: engine`: number format of weights and computation."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the key; the key itself is refused, as it
    would be written into the run's folder. null sends none."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest answer, in tokens, where a call does not say."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, where a call does not say. null leaves it to the server."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling, likewise."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, as the server knows them, such as {reasoning_effort:
    low}."""
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Longest time for one request."""
    deadline_s: float = Field(default=600.0, gt=0, le=86400)
    """Longest time for a call with all its repeated requests, and its wait for its turn."""
    max_tries: int = Field(default=6, ge=1)
    """Most requests for one call, where the server is busy, away or answers nonsense."""
    max_at_once: int = Field(default=16, ge=1, le=1024)
    """Most requests at once, in one process."""
    budget: BudgetSection = BudgetSection()
    price: PriceSection | None = None
    """Prices per million tokens."""
    cache: bool = False
    """Keep answers by all that was asked (model, settings, prompt and seed): what was asked before
    is answered from there, and costs nothing."""
    cache_dir: Path | None = None
    """Folder of the answers that are kept; any number of runs may share one. Default: in the run's
    folder."""
    cache_mib: int = Field(default=1024, ge=1)
    """Most MiB of answers that are kept: of more the oldest go."""

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or REFERENCE.search(url):
            raise ValueError(
                "a user, a password or a key in a URL would be written into the run's folder, and "
                "paths are put behind it: give the key as api_key: ${env:NAME}, and nothing behind "
                "a `?`"
            )

        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{url!r} is no URL: give one such as http://127.0.0.1:8000/v1")

        return url.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _extra_is_further(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_OWN_FIELDS.intersection(extra))
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: each call sets this by itself, and the budget counts with "
                "it: leave it out; the length of answers is max_new_tokens"
            )
        return extra

    @model_validator(mode="after")
    def _an_engine_has_no_server(self) -> Self:
        if self.api == "engine" and (self.base_url or self.api_key is not None or self.extra):
            raise ValueError(
                "api: engine computes the model in this process: leave base_url, api_key and extra "
                "out, or name the API of the server"
            )

        if self.api == "engine" and self.model == "tiny":
            raise ValueError(
                "model tiny is made anew for each run, and knows nothing: name another"
            )

        return self

    @model_validator(mode="after")
    def _cost_needs_a_price(self) -> Self:
        if self.budget.cost is not None and self.price is None:
            raise ValueError(
                "budget.cost counts money, and nothing says what a token costs: give price, such "
                "as {prompt: 0.4, completion: 1.6} per million tokens"
            )
        return self

    @property
    def url(self) -> str:
        return self.base_url or DEFAULT_URLS[self.api]


def name_problems(names: list[str], policy: str) -> list[str]:
    """Names that a remote model can't have, as 'what: remedy'. `policy`: the trained model."""
    taken = [name for name in names if name in (policy, "policy")]
    return [
        f"remote_models: {name!r} is what clients call the policy: choose another name"
        for name in taken
    ] + [
        f"remote_models: {name[:100]!r} is no name: use letters and digits, and behind the first "
        "any of _.:/- too"
        for name in names
        if not _NAME.fullmatch(name)
    ]


def unknown_helpers(names: Collection[str], agent: Section) -> Iterator[str]:
    """Helpers of the section `agent` that are missing in `remote_models`, as 'what: remedy'."""
    context = getattr(agent, "context", None)
    browse = getattr(agent, "browse", None)

    references = [("agent.context.summary_model", getattr(context, "summary_model", None))]
    references += [("agent.browse.models", name) for name in getattr(browse, "models", ())]
    for key, name in references:
        if name is not None and name not in names:
            hint = suggest_nearest(name, list(names))
            model_names = ", ".join(names) or "none"
            yield (
                f"{key}: there is no remote model {name!r}: {hint}add it to remote_models, which "
                f"has {model_names}"
            )
