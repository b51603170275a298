"""The base of every section of a recipe."""

from __future__ import annotations

import pydantic


class Section(pydantic.BaseModel):
    """Base of every section: unknown keys are refused, values never change."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )
