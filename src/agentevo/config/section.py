"""The base of every section of a recipe."""

from __future__ import annotations

import pydantic

ONE_OR_MANY = pydantic.BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
"""In `Annotated[tuple[str, ...], ONE_OR_MANY]`: one text may be written without its list."""


class Section(pydantic.BaseModel):
    """Base of every section: unknown keys are refused, values never change."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )
