"""The model that writes tasks. It runs behind an API or on this machine."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError
from agentevo.models.files.resolve import missing_model

TIMEOUT_S = 1800.0
"""The time limit of a reply of a model on this machine, in seconds. The machine may have other
work."""
CONCURRENCY = 4
"""The number of concurrent requests to a model on this machine. More would share its time."""
MAX_REPLY_TOKENS = 600
"""The maximum number of tokens of such a reply."""


def writer_section(
    word: str,
    *,
    name: str = "default",
    key: str | None = None,
    known_models: Mapping[str, RemoteModelSection] | None = None,
) -> RemoteModelSection:
    """`word` is a name of `known_models`, a URL (OpenAI's API for the model `name`, or URL#MODEL),
    or a local model as in model.name: a folder, a run or a known model. `key`: ${env:NAME}, for a
    URL. Raises ConfigError for a writer that can't be used."""
    if known_models and word in known_models:
        return known_models[word]

    try:
        if "://" in word:
            url, _, model = word.partition("#")
            return RemoteModelSection(base_url=url, model=model or name, api_key=key)

        section = RemoteModelSection(
            api="engine",
            model=word,
            api_key=key,
            timeout_s=TIMEOUT_S,
            deadline_s=TIMEOUT_S,
            max_at_once=CONCURRENCY,
            max_new_tokens=MAX_REPLY_TOKENS,
        )
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        what = wrong["msg"].removeprefix("Value error, ")
        raise ConfigError(f"writer: {'.'.join(map(str, wrong['loc']))}: {what}") from error

    if missing := missing_model(section.model):
        raise ConfigError(f"writer: {missing}; or give the URL of a server")

    return section
