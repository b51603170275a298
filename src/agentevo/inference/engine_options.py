"""Reads `engine.options`, before anything is started."""

from __future__ import annotations

from typing import TypeVar

import pydantic

from agentevo.config import EngineSection
from agentevo.errors import ConfigError
from agentevo.runtime.registry import nearest
from agentevo.runtime.section import Section

OptionsT = TypeVar("OptionsT", bound=Section)


def read_engine_options(section: EngineSection, options: type[OptionsT], engine: str) -> OptionsT:
    """The options of an engine whose numbers can depend on the other requests in a step. Raises
    ConfigError for options that it does not have, and for keys of `engine` that it does not
    support."""
    if section.batch_invariant:
        raise ConfigError(
            f"engine.batch_invariant: {engine}'s numbers can depend on the other requests in a "
            "step: leave the key out, or use engine.type=torch"
        )

    try:
        return options.model_validate(section.options)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(["engine.options", *map(str, wrong["loc"])])
        if wrong["type"] != "extra_forbidden":
            # A value of type text may be a key, and so may a part of the whole section.
            is_secret = wrong["type"] in ("value_error", "string_type")
            value = "" if is_secret else f"got {wrong['input']!r}: "
            problem = wrong["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{key}: {value}{problem}") from error

        names = list(options.model_fields)
        guess = nearest(str(wrong["loc"][-1]), names)
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"{key}: {engine} gets no such option: {hint}give one of {', '.join(names)}"
        ) from error
