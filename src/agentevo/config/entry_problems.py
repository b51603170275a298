"""Messages about an entry of a list, such as `rewards` or `agent.tools`, in the words of its keys
(field_words.py). Pydantic's own texts do not reach a user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentevo.config.field_words import (
    LISTS,
    alternative_types,
    as_yaml,
    choices_of,
    describe_wrong_value,
    section_model,
    type_in_words,
)
from agentevo.registry import nearest


def entry_problem(place: str, model: type[pydantic.BaseModel], error: ErrorDetails) -> str:
    """One pydantic error of the entry at `place`, as `key: what is wrong; what is allowed`."""
    loc = error["loc"]
    section, info, rest = _locate(model, loc)
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        field_names = list(section.model_fields)
        guess = nearest(str(loc[-1]), field_names)
        above = ".".join(str(part) for part in (*loc[:-1], ""))
        hint = f"; did you mean {above}{guess}?" if guess else f"; it has {', '.join(field_names)}"
        return f"{place}.{key}: unknown key{hint}"

    if error["type"] in ("value_error", "assertion_error"):
        reason = str(error["ctx"]["error"])
        return f"{place}.{key}: got {error['input']!r}; {reason}" if key else f"{place}: {reason}"

    if info is None:
        return f"{place}.{key}: {error['msg']}" if key else f"{place}: {error['msg']}"
    if error["type"] == "missing":
        return f"{place}.{key}: missing; {' '.join((info.description or '').split())}"

    above = ".".join(str(part) for part in loc[: len(loc) - len(rest)])
    return f"{place}.{above}{wrong_value(info, rest, error['input'])}"


def wrong_value(info: FieldInfo, rest: tuple[int | str, ...], value: object) -> str:
    """The end of a line about a value of a field: `: got 5; needs a text`. `rest`: the place within
    the field's value, from pydantic."""
    inside = ""
    expected = info
    for part in rest:
        item = _item_type(expected.annotation, part)
        if item is None:
            break  # the alternative of several that pydantic means
        inside += f"[{part}]" if isinstance(part, int) else f".{part}"
        expected = FieldInfo.from_annotation(item)

    kinds = alternative_types(expected.annotation)
    advice = ""
    if (
        isinstance(value, str)
        and value.strip()
        and all(get_origin(kind) in LISTS for kind in kinds)
    ):
        listed = f"[{', '.join(value.replace(',', ' ').split())}]"
        is_plain = re.fullmatch(r"[\[\] ,\w./-]{1,80}", listed) is not None
        advice = f", as in {listed}" if is_plain else ", in [brackets]"
    elif str in kinds and isinstance(value, (bool, int, float)):
        advice = ": write it in quotes"
    elif not inside and not info.is_required():
        advice = f" (default {as_yaml(info.get_default(call_default_factory=True))})"

    words = type_in_words(expected)
    return f"{inside}: {describe_wrong_value(value, words, choices_of(expected), advice)}"


def _locate(
    model: type[pydantic.BaseModel], loc: tuple[int | str, ...]
) -> tuple[type[pydantic.BaseModel], FieldInfo | None, tuple[int | str, ...]]:
    """The innermost section on the path to a place, its field there, and the rest of the path
    within the field's value."""
    for depth, part in enumerate(loc):
        info = model.model_fields.get(str(part))
        inner = None if info is None else section_model(info.annotation)
        if info is None or inner is None or depth == len(loc) - 1:
            return model, info, loc[depth + 1 :]
        model = inner
    return model, None, ()


def _item_type(annotation: Any, part: int | str) -> Any:
    """The type of the items of a list, or of a mapping's values; None for anything else."""
    for kind in alternative_types(annotation):
        origin = get_origin(kind)
        arguments = get_args(kind)
        if isinstance(part, int) and origin in LISTS and arguments:
            is_like = origin is not tuple or Ellipsis in arguments
            return arguments[0] if is_like else arguments[min(part, len(arguments) - 1)]
        if isinstance(part, str) and origin in (dict, Mapping) and arguments:
            return arguments[1]

    return None
