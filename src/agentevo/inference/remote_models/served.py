"""Checks a model's name against the list of a server of OpenAI's or Anthropic's API (`GET
.../models`), so that an unknown name is reported before the first request."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError, shown
from agentevo.inference.remote_models.model import WIRES, key_of_model
from agentevo.runtime.registry import nearest

WITHIN_S = 20.0
MAX_LISTED = 10
MAX_LIST = 4 * 2**20
"""The most bytes of a list."""


def served_models(name: str, section: RemoteModelSection) -> list[str] | None:
    """The names that the server of a remote model lists; None if it has no such list. Raises
    ConfigError for a server that can't be reached or refuses the key."""
    import httpx

    wire = WIRES[section.api]
    key = key_of_model(name, section)
    url = _list_url(section)
    try:
        with httpx.stream(
            "GET", url, headers=wire.headers(key), timeout=min(WITHIN_S, section.timeout_s)
        ) as response:
            content = b""
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_LIST:
                    return None

        status = response.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"remote_models.{name}: {section.url} can't be reached "
            f"({type(error).__name__}): start its server, or correct base_url"
        ) from error

    if status in (401, 403):
        what = f"the key of {section.api_key}" if section.api_key else "a request without a key"
        raise ConfigError(
            f"remote_models.{name}: {section.url} refuses {what} (status {status}): give "
            "api_key: ${env:NAME}  with a key that it accepts"
        )

    return _names(content) if status == 200 else None


def _list_url(section: RemoteModelSection) -> str:
    parts = urlsplit(section.url)
    path = parts.path.rstrip("/")
    if section.api == "anthropic" and not path.endswith("/v1"):
        path += "/v1"
    return urlunsplit(parts._replace(path=f"{path}/models"))


def _names(content: bytes) -> list[str] | None:
    import msgspec

    try:
        listing = msgspec.json.decode(content)
        return [entry["id"] for entry in listing["data"] if isinstance(entry["id"], str)]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError):
        return None


def check_served(name: str, section: RemoteModelSection) -> None:
    """Raises ConfigError if the server lists its models and this model is not listed."""
    if section.api == "engine":
        return

    model_names = served_models(name, section)
    if model_names is None or section.model in model_names or not model_names:
        return

    guess = nearest(section.model, model_names)
    hint = f"did you mean {guess!r}? " if guess else ""
    rest = f" and {len(model_names) - MAX_LISTED} others" if len(model_names) > MAX_LISTED else ""
    raise ConfigError(
        f"remote_models.{name}.model: {section.url} serves no {shown(section.model)}: {hint}it has "
        f"{', '.join(map(shown, model_names[:MAX_LISTED]))}{rest}; the name is what the server was "
        "started with (vLLM's --served-model-name)"
    )
