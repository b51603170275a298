"""Values that are invalid in every section. The tree is checked for them before the sections' own
checks, also in sections of other packages and of user code.

- true or false for a number or a text, which pydantic would read as 1, 0 or "True"
- numbers that are not finite, or beyond NUMBERS if the key has no bound
- values that are valid in another system, or mean something else there (peer_keys.md)
- texts that files, databases or tokenizers can't store, and paths that file systems can't
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

from agentevo.config.field_words import as_number, as_yaml
from agentevo.config.keys import ConfigKeys
from agentevo.config.peer_keys import value_in_our_words
from agentevo.runtime.paths import name_problem

NUMBERS = 1e9
"""Bound on the absolute value of every count, time in seconds and size."""


def refused_values(
    tree: Mapping[str, Any], keys: ConfigKeys, *, chosen: Mapping[str, str], prefix: str = ""
) -> list[str]:
    """A line for each such value in `tree`. `chosen`: as in `ConfigKeys.problem`."""
    lines: list[str] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            lines += refused_values(value, keys, chosen=chosen, prefix=f"{key}.")
            continue

        for place, item in _items(key, value):
            problem = _problem(key, item, keys)
            remark = value_in_our_words(key, item)
            if remark is not None:
                lines.append(f"{place}: got {as_yaml(item)}; {remark}")
            elif problem is _NOT_OF_THE_KIND:
                lines.append(keys.wrong_value(key, item, chosen=chosen, place=place))
            elif problem:
                lines.append(f"{place}: {problem}")

    return lines


_NOT_OF_THE_KIND = "not of the kind"


def _items(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _items(f"{key}[{index}]", item)
    else:
        yield key, value


def _problem(key: str, value: object, keys: ConfigKeys) -> str:
    kinds = keys.kinds(key)
    if isinstance(value, bool):
        fits = not kinds or any(
            kind in (bool, Any) or get_origin(kind) is Literal for kind in kinds
        )
        return "" if fits else _NOT_OF_THE_KIND

    if isinstance(value, (str, Path)):
        return _text_problem(str(value), kinds) or _number_problem(as_number(value), key, keys)

    return _number_problem(value, key, keys)


def _text_problem(text: str, kinds: list[Any]) -> str:
    if Path in kinds:
        problem = name_problem(text)
        return f"this path {problem}" if problem else ""

    if "\0" in text:
        return "a text with a NUL character: remove it"

    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair: remove it"

    return ""


def _number_problem(value: object, key: str, keys: ConfigKeys) -> str:
    kinds = keys.kinds(key)
    if not isinstance(value, (int, float)) or not any(kind in (int, float) for kind in kinds):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_OF_THE_KIND
    if abs(value) <= NUMBERS or keys.has_bound(key):
        return ""
    return f"got {value}; a number here is between -{NUMBERS:,.0f} and {NUMBERS:,.0f}"
