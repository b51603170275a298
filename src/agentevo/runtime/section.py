"""The base of every section of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pydantic


def _as_many(value: object) -> object:
    return (str(value),) if isinstance(value, (str, Path)) and str(value) else value


ONE_OR_MANY = pydantic.BeforeValidator(_as_many)
"""For a list of texts: a single text can be written without the list."""
Texts = Annotated[tuple[str, ...], ONE_OR_MANY]


def expand_home(remedy: str) -> pydantic.BeforeValidator:
    """For a path: `~` is the user's folder, and an empty text is refused, with the remedy."""

    def expand(value: object) -> object:
        if value == "":
            raise ValueError(f"got an empty path; {remedy}")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value

    return pydantic.BeforeValidator(expand)


class Section(pydantic.BaseModel):
    """Base of every section: unknown keys are refused, values never change."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )
