"""A field of a pydantic model in plain words: its type, range and unit, how YAML would write a
value of it, and what is wrong with a value. Pydantic's own texts do not reach a user."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentevo.runtime.registry import nearest

M = TypeVar("M", bound=pydantic.BaseModel)
COUNTED = {
    "tokens",
    "steps",
    "episodes",
    "turns",
    "actions",
    "tasks",
    "epochs",
    "threads",
    "layers",
    "heads",
    "samples",
    "minibatches",
}
"""Nouns that are their own unit when they end a key's name, or appear in its docstring as `in
tokens`."""
LISTS = (tuple, list, set, frozenset)
SUFFIXES = {"s": "seconds", "gb": "GiB"}


@dataclass(frozen=True)
class InWords:
    """In an `Annotated`, the words for a type whose own name means nothing in a recipe."""

    singular: str
    plural: str


def type_in_words(info: FieldInfo) -> str:
    """`whole number, at least 1, or null`."""
    limits = [*info.metadata, *_annotated_limits(info.annotation)]
    return ", ".join([_alternatives(info.annotation), *_range_in_words(limits)]) + _or_null(
        info.annotation
    )


def alternative_types(annotation: Any) -> list[Any]:
    """The alternatives of a union without None and without Annotated wrappings; the annotation
    itself if it is not a union."""
    if get_origin(annotation) is Annotated:
        return alternative_types(get_args(annotation)[0])

    if get_origin(annotation) in (Union, types.UnionType):
        return [
            kind
            for member in get_args(annotation)
            if member is not type(None)
            for kind in alternative_types(member)
        ]

    return [annotation]


def section_model(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model of a section, which may be null; None for any other type."""
    kinds = [kind for kind in alternative_types(annotation) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, pydantic.BaseModel)), None)


def item_types(kind: Any) -> list[Any]:
    """The types of the items of a list or tuple, else the type itself."""
    if get_origin(kind) not in LISTS:
        return [kind]

    alternatives = [
        alternative
        for argument in get_args(kind)
        if argument is not Ellipsis
        for alternative in alternative_types(argument)
    ]
    return [item for alternative in alternatives for item in item_types(alternative)]


def _annotated_limits(annotation: Any) -> list[Any]:
    """Constraints inside a type: those of `Annotated[int, Field(ge=1)]`, alone or in a union."""
    if get_origin(annotation) is Annotated:
        return [
            limit
            for extra in get_args(annotation)[1:]
            for limit in getattr(extra, "metadata", [extra])
        ]

    if get_origin(annotation) in (Union, types.UnionType):
        return [limit for member in get_args(annotation) for limit in _annotated_limits(member)]

    return []


SIMPLE_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "any value",
}
PLURALS = {
    "whole number": "whole numbers",
    "number": "numbers",
    "text": "texts",
    "path": "paths",
    "true or false": "true or false values",
}


def _alternatives(annotation: Any) -> str:
    if (words := _words_of(annotation)) is not None:
        return words.singular
    return " or ".join(_name_of_type(kind) for kind in alternative_types(annotation))


def _or_null(annotation: Any) -> str:
    return (
        ", or null"
        if get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)
        else ""
    )


def _words_of(annotation: Any) -> InWords | None:
    """The words that an annotation gives for its type."""
    extras = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, InWords)), None)


def _name_of_type(kind: Any) -> str:
    if kind in SIMPLE_TYPES:
        return SIMPLE_TYPES[kind]

    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"

    if origin in LISTS and arguments:
        if (words := _words_of(arguments[0])) is not None:
            return f"list of {words.plural}"

        item = _alternatives(arguments[0])
        limits = _range_in_words(_annotated_limits(arguments[0]))
        number = "" if origin is not tuple or Ellipsis in arguments else f"{len(arguments)} "
        plural = PLURALS.get(item, item.replace("mapping ", "mappings ", 1))
        return f"list of {number}{plural}" + (f", each {', '.join(limits)}" if limits else "")

    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return "mapping of names to texts" if arguments == (str, str) else "mapping"
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return f"mapping with keys such as {next(iter(kind.model_fields), 'type')}"

    return typing.cast(str, getattr(kind, "__name__", str(kind)))


RANGES = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "of the form {}",
}


def _range_in_words(constraints: list[Any]) -> list[str]:
    bounds = [
        (words, getattr(limit, name, None))
        for limit in constraints
        for name, words in RANGES.items()
    ]
    return [words.format(as_yaml(bound)) for words, bound in bounds if bound is not None]


def unit_of(name: str, meaning: str, kinds: list[Any]) -> str:
    """The unit of a key, from its name (`timeout_s`, `micro_batch_tokens`, `groups_per_step`),
    else from the docstring (`..., in tokens`)."""
    if not any(kind in (int, float) for kind in kinds):
        return ""

    last = name.rsplit("_", 1)[-1]
    if last in SUFFIXES and "_" in name:
        return SUFFIXES[last]
    if last in COUNTED:
        return last
    if "_per_" in name:
        return name.replace("_", " ")

    stated = [
        word
        for word in re.findall(r"\bin ([a-z]+)\b", meaning)
        if word in COUNTED | {"seconds", "units", "bytes", "cells"}
    ]
    return stated[0] if stated else ""


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """The values that a field allows, if they can be listed."""
    kinds = alternative_types(info.annotation)
    if kinds == [bool]:
        return ("true", "false")
    return tuple(
        str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)
    )


def with_article(words: str) -> str:
    """`a whole number, at least 1`; lists of choices and `true or false` take no article."""
    return words if words.startswith(("one of", "true or false", "any value")) else f"a {words}"


def as_number(value: object) -> float | None:
    """A number, also of a text, as pydantic reads one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def describe_wrong_value(
    value: object, expected: str, choices: Sequence[str] = (), advice: str = ""
) -> str:
    """`got 5; needs a text`, with the nearest of the `choices`."""
    hint = suggest_nearest(value, choices)
    return f"got {as_yaml(value)}; {hint}needs {with_article(expected)}{advice}"


def describe_wrong_choice(
    place: str, entry: Mapping[str, Any], key: str, choices: Sequence[str], remedy: str = ""
) -> str:
    """The line about an entry whose `key` has an unknown name or none. `remedy`: another way to
    correct a wrong name."""
    name = entry.get(key)
    choice = f"choose one of {', '.join(choices)}"
    if key not in entry:
        return f"{place}.{key}: missing; {choice}"
    return f"{place}.{key}: got {name!r}; {suggest_nearest(name, choices)}{choice}{remedy}"


def suggest_nearest(value: object, choices: Sequence[str]) -> str:
    """`did you mean x? `, or nothing."""
    guess = nearest(value, list(choices)) if isinstance(value, str) else None
    return f"did you mean {guess}? " if guess else ""


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def as_yaml(value: object) -> str:
    """A value as YAML writes it on one line, cut after 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]

    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(as_yaml(item) for item in value) + "]"
    else:
        text = repr(str(value)) if isinstance(value, (str, Path)) else str(value)

    return text if len(text) <= 60 else f"{text[:57]}..."


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


def read_entry(
    place: str,
    entry: Any,
    names: Sequence[str],
    model_of: Callable[[str], type[M]],
    remedy: str = "",
) -> tuple[M | None, list[str]]:
    """An entry of a list, which is a name or a mapping with a `name`, read by the model of that
    name; or a line about each problem. `remedy`: another way to correct a wrong name."""
    options = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(options, Mapping):
        return None, [f"{place}: got {entry!r}; needs a name, or a mapping with a name"]

    name = options.get("name")
    if not isinstance(name, str) or name not in names:
        return None, [describe_wrong_choice(place, options, "name", names, remedy)]

    model = model_of(name)
    try:
        return model.model_validate(options), []
    except pydantic.ValidationError as error:
        return None, [entry_problem(place, model, detail) for detail in error.errors()]


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
