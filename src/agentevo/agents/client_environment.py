"""Environment variables that point clients of OpenAI's and Anthropic's APIs to the gateway."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

PLACEHOLDER_KEY = "agentevo"
"""The API key of clients that require one although the attempt is identified in another way. It
gives no access."""
_PROXIES = ("HTTP_PROXY", "ALL_PROXY")


def client_variables(
    gateway_url: str, api_key: str, environment: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """Variables to set, or to remove if the value is None, in addition to those of `environment`.
    If `environment` has a proxy, the gateway is reached without it."""
    base_url = f"{gateway_url}/v1"
    variables: dict[str, str | None] = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": None,
    }
    if any(environment.get(name) or environment.get(name.lower()) for name in _PROXIES):
        proxy_exceptions = environment.get("no_proxy") or environment.get("NO_PROXY")
        hosts = ",".join(filter(None, [proxy_exceptions, urlsplit(gateway_url).hostname]))
        variables |= {"NO_PROXY": hosts, "no_proxy": hosts}

    return variables
