"""Reads YAML and JSON that may be written by hand, by another program, or damaged. Limits ensure
that no text makes the reader crash, hang or run out of memory.

The keys of a mapping are texts, as they are written: `1: x` and `~: x` have the keys `1` and `~`.
YAML is version 1.1 without dates and without numbers to the base of 60: `12:30` is a text. `1e-5`
is a number, a key may not occur twice, and only aliases and merges (`<<`) go beyond JSON. The
result consists of mappings, lists, texts, numbers, true, false and null.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from agentevo.errors import ConfigError

MAX_BYTES = 1_000_000
"""The maximum size of a file of YAML, or of JSON that is one object. For YAML, also the maximum
number of characters of all texts, where an alias counts each time it is used."""
MAX_DEPTH = 64
"""The maximum depth of nested lists and mappings."""
MAX_VALUES = 100_000
"""The maximum number of values in a text of YAML. An alias counts each time it is used."""
MAX_KEY = 200
"""The maximum number of characters in the key of a mapping."""
MAX_DIGITS = 40
"""The maximum number of characters in a whole number."""

_TAG = "tag:yaml.org,2002:"
_NUMBERS = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_WHOLE_NUMBERS = re.compile(
    r"^[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$",
)


class ParseError(ValueError):
    """A text is not valid. The message names the line and the problem."""


def read_text(path: Path, *, at_most: int = MAX_BYTES) -> str:
    """The text of a user's file. Raises ConfigError if it is not a file, can't be read, has more
    than `at_most` bytes, or is not UTF-8."""
    size = check_file(path)
    if size > at_most:
        raise ConfigError(
            f"{path}: has {size:,} bytes, and at most {at_most:,} are read: give another file"
        )

    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error


def check_file(path: Path) -> int:
    """The size in bytes of a file. Raises ConfigError for anything else, because reading a pipe
    would wait, and a device has no end."""
    try:
        what = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: can't be read: {reason}") from error

    if not stat.S_ISREG(what.st_mode):
        kind = "a folder" if stat.S_ISDIR(what.st_mode) else "a device, pipe or socket"
        raise ConfigError(f"{path}: is {kind}: give a file")

    return what.st_size


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that AgentEvo wrote. Raises ConfigError for a damaged file."""
    try:
        value = parse_json(read_text(path))
    except ParseError as error:
        raise ConfigError(f"{path}: is damaged: {error}: restore or delete it") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is damaged: it is not a JSON object: restore or delete it")
    return value


def parse_json(text: str | bytes) -> Any:
    """Raises ParseError, also for nesting beyond MAX_DEPTH and for whole numbers that no program
    could print."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ParseError(reason.partition(";")[0]) from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ParseError for lists and mappings in more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return

    raise ParseError(f"it is nested in more than {MAX_DEPTH} levels")


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. None for an empty document. Raises ParseError."""
    try:
        _check_nesting(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise ParseError(f"{place}not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ParseError(f"not valid YAML: {' '.join(str(error).split())}") from error

    return None if node is None else _Tree().value(node, MAX_DEPTH)


def _check_nesting(text: str) -> None:
    """Raises ParseError for deep nesting. Composing a document recurses in C, where a deep text
    would end the process. Reading events does not."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _wrong(event, f"nested in more than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Determines the type of each plain scalar: `1e-5` is a number, and a date or a time is a
    text."""


_OTHERWISE = {f"{_TAG}{kind}" for kind in ("timestamp", "float", "int")}
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _OTHERWISE]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", _NUMBERS, list("-+0123456789."))
_Loader.add_implicit_resolver(f"{_TAG}int", _WHOLE_NUMBERS, list("-+0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or `_Loader` would read as another value."""


for _kind, _pattern in (("float", _NUMBERS), ("int", _WHOLE_NUMBERS)):
    _Dumper.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, list("-+0123456789."))


def dump_yaml(tree: Any) -> str:
    """A plain tree as YAML that `parse_yaml` reads as the same tree, with keys in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Tree:
    """Makes a plain tree of the nodes of a document, and counts its values."""

    def __init__(self) -> None:
        self._num_values = 0
        self._num_characters = 0
        self._scalars = SafeConstructor()

    def value(self, node: yaml.Node, depth: int) -> Any:
        self._num_values += 1
        if depth == 0:
            raise _wrong(node, f"nested in more than {MAX_DEPTH} levels")
        if self._num_values > MAX_VALUES:
            raise _wrong(node, f"more than {MAX_VALUES:,} values, with those of aliases")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)

        if isinstance(node, yaml.SequenceNode):
            if node.tag != f"{_TAG}seq":
                raise _wrong_tag(node)
            return [self.value(item, depth - 1) for item in node.value]

        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        if node.tag != f"{_TAG}map":
            raise _wrong_tag(node)

        own_keys: dict[str, Any] = {}
        merged: list[dict[str, Any]] = []
        for key, item in node.value:
            value = self.value(item, depth - 1)
            if key.tag == f"{_TAG}merge":
                mappings = value if isinstance(value, list) else [value]
                if not all(isinstance(mapping, dict) for mapping in mappings):
                    raise _wrong(item, "`<<` takes a mapping, or a list of them")
                merged += mappings
                continue

            name = _key(key)
            if name in own_keys:
                raise _wrong(key, f"not valid YAML: found duplicate key {name}")

            own_keys[name] = value

        values: dict[str, Any] = {}
        for mapping in reversed(merged):  # the first mapping has precedence
            values.update(mapping)

        return {**values, **own_keys}

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag in (f"{_TAG}str", f"{_TAG}value"):
            if "\0" in node.value:
                raise _wrong(node, "a text with a NUL character: remove it")

            self._num_characters += len(node.value)
            if self._num_characters > MAX_BYTES:
                raise _wrong(
                    node, f"more than {MAX_BYTES:,} characters of text, with those of aliases"
                )

            return node.value

        if node.tag == f"{_TAG}int" and len(node.value) > MAX_DIGITS:
            raise _wrong(
                node,
                f"a whole number of {len(node.value)} characters: write at most {MAX_DIGITS}",
            )

        if node.tag not in {f"{_TAG}{kind}" for kind in ("int", "float", "bool", "null")}:
            raise _wrong_tag(node)

        try:
            return self._scalars.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise _wrong(
                node, f"{_shown(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            ) from error


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong(node, "not valid YAML: a key is a list or a mapping: write a text")
    if "\0" in node.value or not node.value:
        raise _wrong(node, "a key that is empty, or has a NUL character: write a text")
    if len(node.value) > MAX_KEY:
        raise _wrong(node, f"a key of {len(node.value):,} characters: write at most {MAX_KEY}")
    return str(node.value)


def _wrong_tag(node: yaml.Node) -> ParseError:
    tag = _shown(node.tag.replace(_TAG, "!!"))
    return _wrong(node, f"not valid YAML: the tag {tag} has no meaning here: remove it")


def _wrong(place: yaml.Node | yaml.Event, what: str) -> ParseError:
    assert place.start_mark is not None
    return ParseError(f"line {place.start_mark.line + 1}: {what}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
