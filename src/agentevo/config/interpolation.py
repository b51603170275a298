r"""`${...}` in a configuration.

`${section.key}` is replaced by another value, `${.key}` by one in the same mapping,
`${oc.env:NAME}` and `${oc.env:NAME,default}` by an environment variable, `${oc.decode:TEXT}` by a
text read as YAML. They can appear within a text and within one another; `\${` is no interpolation.
`${env:NAME}` is not changed (`agentevo.runtime.credentials`).

Each value is resolved once, and the size of the result is counted: `a: ${b}${b}`, `b: ${c}${c}` and
so on, in texts or in lists, doubles at every step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from agentevo.runtime.credentials import REFERENCE, without_passwords
from agentevo.runtime.parsing import MAX_BYTES, MAX_VALUES, ParseError, check_depth, parse_yaml

Key = tuple[str | int, ...]
_OUTSIDE = re.compile(r"\\*+\$\{|[^\\$]++|\\++|\$")
_WITHIN = re.compile(r"""\\*+\$\{|[{}]|"[^"]*+"|'[^']*+'|[^\\${}"']++|.""", re.DOTALL)
_OPENING = re.compile(r"(?P<slashes>\\*+)\$\{(?P<name>env:[A-Za-z_][A-Za-z0-9_]*\})?")
_PLACEHOLDER = re.compile(r"<YOUR_\w+>(/\S*)?")
"""A placeholder of a template for a name or a path."""
_HINT = r"`${...}` refers to another key; as plain text, write \${"


class InterpolationError(ValueError):
    """`key: what is wrong`."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(f"{_written(key)}: {what}")


def resolve_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with every `${...}` resolved. Raises InterpolationError, also for `???`,
    for `<YOUR_...>` and for a result beyond the limits of `parsing`."""
    value = Resolver(tree).value((), tree)
    assert isinstance(value, dict)
    return value


class Resolver:
    """Resolves the values of one tree of mappings, lists and single values."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self._resolved: dict[Key, Any] = {}
        self._in_progress: set[Key] = set()
        self._num_characters = 0
        self._num_values = 0

    def value(self, key: Key, written: Any) -> Any:
        """A copy of the value at `key`, resolved."""
        try:
            value = self._value(key, written)
            self._num_values = self._num_characters = 0
            value = self._copy(key, value)
            check_depth(value)
        except (RecursionError, ParseError) as error:
            problem = "`${...}` are nested too deeply: write the values"
            raise InterpolationError(key, problem) from error

        return value

    def _value(self, key: Key, written: Any) -> Any:
        if key in self._resolved:
            return self._resolved[key]
        if key in self._in_progress:
            raise InterpolationError(key, f"refers to itself; {_HINT}")

        self._in_progress.add(key)
        value = written
        if isinstance(written, Mapping):
            value = {name: self._value((*key, name), item) for name, item in written.items()}
        elif isinstance(written, list):
            value = [self._value((*key, place), item) for place, item in enumerate(written)]
        elif isinstance(written, str) and written == "???":
            raise InterpolationError(key, "??? marks a required value: give the value")
        elif isinstance(written, str) and _PLACEHOLDER.fullmatch(written):
            raise InterpolationError(key, f"{written} is a placeholder: give the value")
        elif is_interpolation(written):
            pieces, _ = self._pieces(key, written, 0, within=False)
            value = pieces[0] if len(pieces) == 1 else self._join_pieces(key, pieces)

        self._in_progress.discard(key)
        self._resolved[key] = value
        return value

    def _copy(self, key: Key, value: Any) -> Any:
        """Gives each key its own copy of a value that several keys share."""
        self._count(key, 1, len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            return {name: self._copy((*key, name), item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._copy((*key, place), item) for place, item in enumerate(value)]
        return value

    def _count(self, key: Key, num_values: int, num_characters: int) -> None:
        self._num_values += num_values
        self._num_characters += num_characters
        if self._num_values > MAX_VALUES or self._num_characters > MAX_BYTES:
            raise InterpolationError(
                key,
                f"with every `${{...}}` resolved, there are more than {MAX_VALUES:,} values or "
                f"{MAX_BYTES:,} characters: write fewer `${{...}}`",
            )

    def _pieces(self, key: Key, text: str, place: int, *, within: bool) -> tuple[list[Any], int]:
        """The text from `place` on as texts and values, and the index of its end. `within` an
        interpolation, the end is behind the brace that closes it."""
        pieces: list[Any] = []
        num_open = 0
        while place < len(text):
            match = (_WITHIN if within else _OUTSIDE).match(text, place)
            assert match is not None

            token = match[0]
            place = match.end()
            if token.endswith("${"):
                num_backslashes = len(token) - 2
                if num_backslashes > 1:
                    pieces.append("\\" * (num_backslashes // 2))

                if num_backslashes % 2:
                    pieces.append("${")
                    continue

                inner, place = self._pieces(key, text, place, within=True)
                pieces.append(self._meaning(key, self._join_pieces(key, inner).strip()))
                continue

            if within and token == "}" and num_open == 0:
                return pieces, place

            num_open += (token == "{") - (token == "}")
            pieces.append(token)

        if within:
            raise InterpolationError(key, f"`${{` without the `}}` that closes it; {_HINT}")

        return pieces, place

    def _join_pieces(self, key: Key, pieces: list[Any]) -> str:
        if any(isinstance(piece, (dict, list)) for piece in pieces):
            raise InterpolationError(
                key, f"a list or mapping can't be part of a text or a key; {_HINT}"
            )
        texts = [str(piece) for piece in pieces]
        self._count(key, 0, sum(map(len, texts)))
        return "".join(texts)

    def _meaning(self, key: Key, expression: str) -> Any:
        """The value of `${expression}`."""
        name, colon, argument = expression.partition(":")
        if not colon:
            return self._value_of_name(key, expression)
        if REFERENCE.fullmatch(f"${{{expression}}}"):
            return f"${{{expression}}}"
        if name.strip() == "oc.env":
            return _variable(key, argument)

        if name.strip() == "oc.decode":
            try:
                return parse_yaml(_unquote(argument))
            except ParseError as error:
                raise InterpolationError(key, f"oc.decode: {error}") from error

        raise InterpolationError(
            key,
            f"`${{{shorten(name)}:...}}` is not known: write ${{section.key}}, ${{oc.env:NAME}} "
            r"or ${oc.decode:TEXT}; as plain text, write \${",
        )

    def _value_of_name(self, key: Key, name: str) -> Any:
        """The value that a key names: from the root, or with leading dots relative to `key`."""
        path = name.lstrip(".")
        num_dots = len(name) - len(path)
        parts = [part.strip() for part in re.split(r"[.\[\]]", path) if part.strip()]
        if num_dots > len(key) or not (parts or num_dots):
            raise InterpolationError(key, f"`${{{shorten(name)}}}` names no key; {_HINT}")

        place: Key = ()
        value: Any = self._tree
        is_resolved = False
        for part in [*key[: len(key) - num_dots], *parts] if num_dots else parts:
            if not is_resolved and is_interpolation(value):
                value = self._value(place, value)
                is_resolved = True

            try:
                step = int(part) if isinstance(value, list) and str(part).isdecimal() else part
                value = value[step]
            except (LookupError, TypeError, ValueError) as error:
                problem = f"Interpolation key {shorten(name)!r} not found; {_HINT}"
                raise InterpolationError(key, problem) from error

            place = (*place, step)

        return value if is_resolved else self._value(place, value)


def escape_tree(value: Any) -> Any:
    """A tree that `resolve_tree` turns into the given one."""
    if isinstance(value, Mapping):
        return {name: escape_tree(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape_tree(item) for item in value]
    return _OPENING.sub(_escape_opening, value) if is_interpolation(value) else value


def _escape_opening(opening: re.Match[str]) -> str:
    return opening[0] if opening["name"] else rf"{opening['slashes'] * 2}\${{"


def is_interpolation(value: Any) -> bool:
    """Whether a value is a text that has to be resolved."""
    return isinstance(value, str) and "${" in value


def _variable(key: Key, argument: str) -> str | None:
    name, comma, default = argument.partition(",")
    name = _unquote(name)
    try:
        value = os.environ.get(name)
    except ValueError:  # no variable can have this name
        value = None

    if value is not None:
        return value

    if not comma:
        raise InterpolationError(
            key,
            f"Environment variable {shorten(name)!r} not found: set it, or write "
            "${oc.env:NAME,default}",
        )

    return None if default.strip() == "null" else _unquote(default)


def _unquote(text: str) -> str:
    text = text.strip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


def _written(key: Key) -> str:
    """`a.b[0]`."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return shorten(name.removeprefix(".") or "value")


def shorten(text: str) -> str:
    """A user's text as a message shows it: without passwords, at most 100 characters."""
    text = without_passwords(text)
    return text if len(text) <= 100 else f"{text[:97]}..."
