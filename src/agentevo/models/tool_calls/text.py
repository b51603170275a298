"""Text that arrives in pieces, and how a parser reads it.

A parser is a generator that reads from a `Text` and yields where it must wait for more; whoever
feeds the text resumes it. What has been decided never depends on where the pieces were cut: a
reader decides on a character only when no further text could change the decision, or when the text
has ended. Every character is taken once, and only the beginning of a possible mark is looked at
again, so the cost is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

Wait = Generator[None, None, None]
"""A reader without a result."""
Emit = Callable[[str], object]
"""Where a reader puts what it has taken."""
_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """What is being read is no call, for the reason that the message gives."""


def ignore(_: str) -> None:
    """An `Emit` for what nobody wants; a call's text is kept all the same."""


class Marks:
    """Strings to look for. None of them begins with another one.

    `patterns` are marks of one character whose context decides: they match that character, look
    ahead no further than is certain, and match where the text known so far ends (`\\Z`).
    """

    def __init__(self, strings: tuple[str, ...], patterns: tuple[str, ...] = ()) -> None:
        self._strings = strings
        self._firsts = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=1)
        alternatives = [*map(re.escape, strings), *patterns]
        self._pattern = re.compile("|".join(alternatives) if alternatives else r"(?!)")

    def find(self, buffer: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(buffer, start)

    def held_from(self, buffer: str, start: int) -> int:
        """Where a mark may have begun that the buffer does not show to its end."""
        for place in range(max(start, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[place] in self._firsts:
                rest = buffer[place:]
                if any(string.startswith(rest) for string in self._strings):
                    return place
        return len(buffer)


@lru_cache(256)
def marks(*strings: str) -> Marks:
    return Marks(strings)


class CallText:
    """See the module."""

    def __init__(self) -> None:
        self.buffer = ""
        """What has come and was not taken, from `at` on."""
        self.at = 0
        self.ended = False
        self.last = ""
        """The character before `at`, "" at the beginning and behind a mark."""
        self.record: list[str] | None = None
        """Everything that was taken since a call began; None outside of calls."""

    def add(self, piece: str) -> None:
        self.buffer = self.buffer[self.at :] + piece
        self.at = 0

    def take(self, end: int) -> str:
        """The text up to that place of the buffer."""
        piece = self.buffer[self.at : end]
        self.at = end
        self.last = piece[-1:] or self.last
        if self.record is not None:
            self.record.append(piece)
        return piece

    def take_next(self, size: int = 1) -> str:
        return self.take(self.at + size)

    def broken(self, problem: str) -> MalformedError:
        """An error that tells how far into the call the text was read."""
        place = sum(map(len, self.record or ())) + 1
        return MalformedError(f"{problem} (at character {place} of the call)")

    def peek(self) -> Generator[None, None, str]:
        """The next character, or "" at the end."""
        while self.at >= len(self.buffer):
            if self.ended:
                return ""
            yield
        return self.buffer[self.at]

    def skip_space(self) -> Generator[None, None, str]:
        """Takes white space, which may be none, and returns it."""
        pieces = []
        while True:
            match = _SPACE.match(self.buffer, self.at)
            assert match is not None
            if match.end() > self.at:
                pieces.append(self.take(match.end()))
            if self.at < len(self.buffer) or self.ended:
                return "".join(pieces)
            yield

    def starts_with(self, *strings: str) -> Generator[None, None, str]:
        """The one of the strings that the text goes on with, or "". None is taken, and none may
        begin with another one."""
        longest = max(map(len, strings))
        while True:
            rest = self.buffer[self.at : self.at + longest]
            for string in strings:
                if rest.startswith(string):
                    return string
            if self.ended or not any(string.startswith(rest) for string in strings):
                return ""
            yield

    def until(self, wanted: Marks, emit: Emit) -> Generator[None, None, str]:
        """Takes the text up to the first of the marks, which it returns and does not take; up to
        the end of the text, and "", where none comes."""
        while True:
            match = wanted.find(self.buffer, self.at)
            if match is not None:
                if match.start() > self.at:
                    emit(self.take(match.start()))
                return match.group()

            safe = len(self.buffer) if self.ended else wanted.held_from(self.buffer, self.at)
            if safe > self.at:
                emit(self.take(safe))
            if self.ended:
                return ""

            yield

    def collect(self, what: str, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """(what comes before the first of the marks, that mark), of which the mark is not taken.
        Raises MalformedError where none comes."""
        pieces: list[str] = []
        mark = yield from self.until(marks(*ends), pieces.append)
        if not mark:
            raise self.broken(f"the text ends inside {what}")
        return "".join(pieces), mark
