"""The model that writes tasks: behind an API, or computed here."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError
from agentevo.models.resolve import missing_model

TIMEOUT_S = 1800.0
"""For one answer of a model that is computed here, on a machine that may have other work."""
AT_ONCE = 4
"""Likewise: more at once share its time."""
LONGEST = 600
"""Tokens of such an answer."""


def writer_section(
    word: str,
    *,
    name: str = "default",
    key: str | None = None,
    known_models: Mapping[str, RemoteModelSection] | None = None,
) -> RemoteModelSection:
    """`word`: a name of `known_models`; a URL, which is OpenAI's API of the model `name`, or
    URL#MODEL; or as in model.name a folder, a run or a known model, which is computed here. `key`:
    ${env:NAME}, for a URL. Raises ConfigError."""
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
            max_at_once=AT_ONCE,
            max_new_tokens=LONGEST,
        )
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        what = wrong["msg"].removeprefix("Value error, ")
        raise ConfigError(f"writer: {'.'.join(map(str, wrong['loc']))}: {what}") from error

    if missing := missing_model(section.model):
        raise ConfigError(f"writer: {missing}; or give the URL of a server")

    return section
