"""Matches a user's regular expressions within a time limit.

Python's `re` holds the interpreter's lock while it backtracks, so a pattern such as `(a+)+$` would
stop the whole process. The package `regex` accepts the same patterns and has a timeout.
"""

from __future__ import annotations

from typing import Any

import regex

LIMIT_S = 2.0
"""The time limit of a match, in seconds. Patterns that don't backtrack need microseconds."""
MAX_PATTERN = 10_000
"""The maximum number of characters of a pattern."""


class Pattern:
    """A regular expression in the syntax of `re`; `.` also matches line breaks."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError for an invalid regular expression."""
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"the pattern has {len(pattern)} characters; give at most 10,000")

        try:
            self._compiled = regex.compile(pattern, regex.DOTALL)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"got {pattern[:200]!r}; it is not a regular expression: {error}"
            ) from error

        self._pattern = pattern

    def matches_whole(self, text: str) -> bool:
        """Whether the pattern matches the whole text. Raises TimeoutError."""
        return bool(self._within_limit(self._compiled.fullmatch, text))

    def last(self, text: str) -> str | None:
        """The last match in the text: its first group if that group took part, else the whole
        match. Raises TimeoutError."""
        matches = self._within_limit(self._all, text)
        if not matches:
            return None
        match = matches[-1]
        in_group = match[1] if self._compiled.groups else None
        return str(match[0] if in_group is None else in_group)

    def _all(self, text: str, **limits: Any) -> list[Any]:
        return list(self._compiled.finditer(text, **limits))

    def _within_limit(self, match: Any, text: str) -> Any:
        try:
            return match(text, timeout=LIMIT_S, concurrent=True)
        except TimeoutError:
            raise TimeoutError(
                f"the pattern {self._pattern[:200]!r} took longer than {LIMIT_S:g} s with a text "
                f"of {len(text)} characters: it has nested repetitions; write it without them"
            ) from None
