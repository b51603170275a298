"""The section `remote_models`: models behind another party's HTTP API, each under the name by which
agents and clients call it. They are never trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentevo.config.field_words import suggest_nearest
from agentevo.runtime.credentials import REFERENCE
from agentevo.runtime.device_names import DeviceName
from agentevo.runtime.section import Section

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
    """Price of a million prompt tokens."""
    cached: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens that were in the server's cache. Default: the price of other
    prompt tokens."""
    completion: float = Field(default=0.0, ge=0)
    """Price of a million completion tokens."""

    def of(self, prompt: int, cached: int, completion: int) -> float:
        """The cost of that many tokens; `cached` of the prompt's tokens were in the server's
        cache."""
        per_cached = self.prompt if self.cached is None else self.cached
        prompt_price = (prompt - cached) * self.prompt + cached * per_cached
        return (prompt_price + completion * self.completion) / 1e6


class BudgetSection(Section):
    """The limits of a run's use of a remote model, over all of its processes and resumptions. A
    call that could exceed a limit is not made."""

    requests: int | None = Field(default=None, ge=1)
    """Maximum number of requests, including retries."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens, prompts and completions together."""
    cost: float | None = Field(default=None, gt=0)
    """Maximum cost, in the currency of `price`."""

    @property
    def limits(self) -> bool:
        return (self.requests, self.tokens, self.cost) != (None, None, None)


class RemoteModelSection(Section):
    """One remote model."""

    api: Literal["openai", "anthropic", "engine"] = "openai"
    """The server's API: OpenAI chat completions (also vLLM, SGLang, Ollama and most others), or
    Anthropic messages. `engine`: no server; each process that calls the model runs it."""
    base_url: str = ""
    """URL of the server, such as http://127.0.0.1:8000/v1. Default: the API's public URL."""
    model: str = Field(min_length=1)
    """The server's name of the model. With `api: engine`, as in model.name: a folder, a run (its
    best checkpoint), or a known model; decoding is greedy if `temperature` is null."""
    tokenizer: str | None = None
    """Of a teacher (distillation.teachers): its tokenizer, a folder, a run or the name of a model.
    Default: `model`."""
    device: DeviceName = "auto"
    """With `api: engine`: the device, as in model.device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """With `api: engine`: number format of weights and computation."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the key; a key itself is refused, since it
    would be written into the run's folder. null sends no key."""
    sees_images: bool = False
    """Whether the model takes images. If not, a request with an image is refused, and an agent that
    it plays reads a text in place of each image of a tool's result."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a completion, in tokens, if the call does not set it."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, if the call does not set it. null leaves it to the server."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling mass (top-p), likewise."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request that the server supports, such as {reasoning_effort: low}."""
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Time limit of one request, in seconds."""
    deadline_s: float = Field(default=600.0, gt=0, le=86400)
    """Time limit of a call, in seconds, with all its retries and its wait in the queue."""
    max_tries: int = Field(default=6, ge=1)
    """Maximum number of requests for one call, if the server is busy, unreachable or replies with
    something invalid."""
    max_at_once: int = Field(default=16, ge=1, le=1024)
    """Maximum number of concurrent requests in one process."""
    budget: BudgetSection = BudgetSection()
    price: PriceSection | None = None
    """Prices per million tokens."""
    cache: bool = False
    """Cache replies by the whole request (model, settings, prompt and seed). A repeated request is
    served from the cache, at no cost."""
    cache_dir: Path | None = None
    """Folder of the cache. Several runs can share one. Default: in the run's folder."""
    cache_mib: int = Field(default=1024, ge=1)
    """Maximum size of the cache, in MiB. Beyond it, the oldest replies are deleted."""

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or REFERENCE.search(url):
            raise ValueError(
                "a user, a password or a key in a URL would be written into the run's folder, and "
                "the API's paths are appended to the URL: give the key as api_key: ${env:NAME}, "
                "and remove the part after `?`"
            )

        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{url!r} is not a URL: give one such as http://127.0.0.1:8000/v1")

        return url.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _extra_is_further(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_OWN_FIELDS.intersection(extra))
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: each call sets this itself, and the budget depends on it: "
                "remove it; the maximum length of a completion is max_new_tokens"
            )
        return extra

    @model_validator(mode="after")
    def _an_engine_has_no_server(self) -> Self:
        if self.api == "engine" and (self.base_url or self.api_key is not None or self.extra):
            raise ValueError(
                "api: engine runs the model in this process: remove base_url, api_key and extra, "
                "or set api to the server's API"
            )

        if self.api == "engine" and self.sees_images:
            raise ValueError(
                "api: engine reads text alone: remove sees_images, or set api to the API of a "
                "server whose model takes images"
            )

        if self.api == "engine" and self.model == "tiny":
            raise ValueError("model tiny has random weights in each run: choose another model")

        return self

    @model_validator(mode="after")
    def _cost_needs_a_price(self) -> Self:
        if self.budget.cost is not None and self.price is None:
            raise ValueError(
                "budget.cost needs the price of a token: give price, such as "
                "{prompt: 0.4, completion: 1.6} per million tokens"
            )
        return self

    @property
    def url(self) -> str:
        return self.base_url or DEFAULT_URLS[self.api]


def name_problems(names: list[str], policy: str) -> list[str]:
    """Names that a remote model can't have, as 'what: remedy'. `policy`: the trained model."""
    taken = [name for name in names if name in (policy, "policy")]
    return [
        f"remote_models: {name!r} is the name by which clients call the policy: choose another name"
        for name in taken
    ] + [
        f"remote_models: {name[:100]!r} is not a valid name: start with a letter or digit, then "
        "use letters, digits and _.:/-"
        for name in names
        if not _NAME.fullmatch(name)
    ]


def unknown_helpers(names: Collection[str], agent: Section) -> Iterator[str]:
    """Models that the section `agent` names and `remote_models` lacks, as 'what: remedy'."""
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
