"""Actions of a structured Gymnasium space, written as JSON.

| space | JSON |
|---|---|
| Box | numbers in lists of the space's shape; a shape of one number also takes a plain number |
| Discrete, MultiDiscrete, MultiBinary | whole numbers, in lists of the space's shape |
| Text | a text |
| Dict, Tuple | an object with all the keys, a list with all the entries |

A player sees `describe_space`. The message of an ActionError has the problem, its place, and the
values of the space.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from agentevo.errors import storable
from agentevo.runtime.parsing import ParseError, parse_json

MAX_BOUNDS = 8
"""The maximum number of different bounds to list. If there are more, only the lowest and the
highest are named."""


class ActionError(ValueError):
    """A text is not an action of a space."""


def can_be_said(space: spaces.Space[Any]) -> bool:
    """Whether the actions of a space have a form in JSON."""
    if isinstance(space, spaces.Dict):
        return all(map(can_be_said, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(can_be_said, space.spaces))
    kinds = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text
    return isinstance(space, kinds)


def read_action(text: str, space: spaces.Space[Any]) -> Any:
    """The action in a JSON text. Raises ActionError."""
    try:
        value = parse_json(text)
    except ParseError as error:
        raise ActionError(f"it is not JSON ({error}): give {describe_space(space)}") from error

    return _read(value, space, "the action")


def write_action(action: Any) -> str:
    """An action of a space as the JSON text that `read_action` reads."""
    return json.dumps(_plain(action), ensure_ascii=False)


def describe_space(space: spaces.Space[Any]) -> str:
    """The form of an action, in words."""
    if isinstance(space, spaces.Dict):
        parts = (f'"{key}": {describe_space(part)}' for key, part in space.spaces.items())
        return f"an object {{{', '.join(parts)}}}"
    if isinstance(space, spaces.Tuple):
        return f"a list of [{', '.join(map(describe_space, space.spaces))}]"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {space.start} to {space.start + space.n - 1}"

    low, high = _bounds(space)
    noun = "number" if low.dtype.kind == "f" else "whole number"
    several = "s" * (low.size != 1)
    return f"{_say_lists(low.shape)}{noun}{several}{_range(low, high)}"


def _say_lists(shape: tuple[int, ...]) -> str:
    if not shape:
        return "a "
    lists = "".join(f"{size} lists of " for size in shape[:-1])
    return f"a list of {lists}{shape[-1]} "


def _range(low: np.ndarray, high: np.ndarray) -> str:
    if low.size and (low.min() != low.max() or high.min() != high.max()):
        if low.size <= MAX_BOUNDS:
            pairs = zip(low.flat, high.flat, strict=True)
            return f" within {', '.join(_interval(*pair) for pair in pairs)}, in this order"
        return f" within {_interval(low.min(), high.max())}, some within less"

    if not low.size or (low.flat[0] == -np.inf and high.flat[0] == np.inf):
        return ""
    return f" within {_interval(low.flat[0], high.flat[0])}"


def _interval(low: Any, high: Any) -> str:
    return f"[{low:g}, {high:g}]"


def _bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest values of a space of numbers, in its shape and dtype."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)

    assert isinstance(space, spaces.Box)
    return space.low, space.high


def _read(value: Any, space: spaces.Space[Any], place: str) -> Any:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            raise ActionError(f"{place} is not an object: give {describe_space(space)}")

        missing = [key for key in space.spaces if key not in value]
        unknown = [key for key in value if key not in space.spaces]
        if missing or unknown:
            problem = f"lacks {missing[0]!r}" if missing else f"has an unknown key {unknown[0]!r}"
            raise ActionError(f"{place} {problem}: give {describe_space(space)}")
        return {key: _read(value[key], part, f'"{key}"') for key, part in space.spaces.items()}

    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ActionError(f"{place} is not such a list: give {describe_space(space)}")
        parts = zip(value, space.spaces, strict=True)
        return tuple(
            _read(item, part, f"entry {number} of {place}")
            for number, (item, part) in enumerate(parts, 1)
        )

    if isinstance(space, spaces.Text):
        if not isinstance(value, str) or not space.contains(value):
            raise ActionError(f"{place} is not such a text: give {describe_space(space)}")
        return value

    if isinstance(space, spaces.Discrete):
        if not _is_whole(value) or not space.start <= value < space.start + space.n:
            raise ActionError(f"{place} is {_show_value(value)}: give {describe_space(space)}")
        return space.dtype.type(value)

    return _read_numbers(value, space, place)


def _read_numbers(value: Any, space: spaces.Space[Any], place: str) -> np.ndarray:
    low, high = _bounds(space)
    if low.size == 1 and not isinstance(value, list):
        value = np.full(low.shape, value, dtype=object).tolist()

    numbers = np.empty(low.shape, dtype=low.dtype)
    _check_shape(value, low.shape, space, place)
    items = _leaves(value)
    for number, (item, index) in enumerate(zip(items, np.ndindex(low.shape), strict=True), 1):
        where = place if low.size == 1 else f"number {number} of {place}"
        converted = _convert_number(item, low.dtype)
        if converted is None or not float(low[index]) <= converted <= float(high[index]):
            raise ActionError(f"{where} is {_show_value(item)}: give {describe_space(space)}")
        numbers[index] = converted

    return numbers


def _check_shape(value: Any, shape: tuple[int, ...], space: spaces.Space[Any], place: str) -> None:
    if not shape:
        if isinstance(value, list):
            raise ActionError(f"{place} is a list: give {describe_space(space)}")
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        size = f"has {len(value)} entries" if isinstance(value, list) else "is not a list"
        raise ActionError(f"{place} {size}: give {describe_space(space)}")
    for number, item in enumerate(value, 1):
        _check_shape(item, shape[1:], space, f"entry {number} of {place}")


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]


def _convert_number(value: Any, dtype: np.dtype[Any]) -> float | None:
    """A number in a space's dtype, so that 0.7 is within a limit of float32's 0.7. None for any
    other value."""
    if dtype.kind != "f":
        return value if _is_whole(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None

    try:
        with np.errstate(over="ignore"):
            rounded = float(dtype.type(value))
    except OverflowError:  # a whole number beyond all floats
        return None
    return rounded if math.isfinite(rounded) else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _show_value(value: Any) -> str:
    text = storable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 40 else f"{text[:37]}..."


def _plain(action: Any) -> Any:
    if isinstance(action, Mapping):
        return {key: _plain(value) for key, value in action.items()}
    if isinstance(action, tuple):
        return [_plain(value) for value in action]
    return action.tolist() if isinstance(action, np.ndarray | np.generic) else action
