"""Lets a parser read text that arrives in pieces.

A parser is a generator that reads from a `CallText`. It yields when it must wait for more text, and
the caller that feeds the text resumes it. Decisions never depend on where the pieces were cut: a
reader decides on a character only if further text can't change the decision, or if the text has
ended. Every character is taken once, and only the beginning of a possible mark is looked at again,
so the cost is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

import regex

Wait = Generator[None, None, None]
"""A reader without a result."""
Emit = Callable[[str], object]
"""A function that receives the text that a reader has taken."""
SPACE = r"[ \t\n\r]*"
"""The white space of JSON. It separates the parts of every notation."""
MAX_WORD = 1000
"""The most characters of a number or word."""


class MalformedError(Exception):
    """The text is not a valid call. The message gives the reason."""


def ignore(_: str) -> None:
    """An `Emit` that discards its text. The text of a call is still recorded."""


class Marks:
    """Strings to search for. None of them is a prefix of another.

    `patterns` are regular expressions of other marks. If the context decides whether a character
    is a mark, its pattern may look ahead only within the text known so far, and must also match at
    the end of this text (`\\Z`).
    """

    def __init__(self, strings: tuple[str, ...], patterns: tuple[str, ...] = ()) -> None:
        self._pattern = regex.compile("|".join([*map(re.escape, strings), *patterns]) or r"(?!)")

    def find(self, text: CallText, *, at_start: bool = False) -> regex.Match[str] | None:
        """The first mark in the text that was not taken, or the beginning of a mark at the end of
        this text (a partial match). `at_start`: only a mark at the current position."""
        look = self._pattern.match if at_start else self._pattern.search
        return look(text.buffer, text.at, partial=not text.ended)


@lru_cache(256)
def marks(*strings: str) -> Marks:
    return Marks(strings)


_NO_SPACE = Marks((), (r"[^ \t\n\r]",))
_NO_WORD = Marks((), (r"[^-+.\w]",))


class CallText:
    """See the module."""

    def __init__(self) -> None:
        self.buffer = ""
        """The text that has arrived. From `at` on, it was not yet taken."""
        self.at = 0
        self.ended = False
        self.last = ""
        """The character before `at`. "" at the beginning and after a mark."""
        self.record: list[str] | None = None
        """Everything that was taken since a call began; None outside of calls."""

    def add(self, piece: str) -> None:
        self.buffer = self.buffer[self.at :] + piece
        self.at = 0

    def take(self, end: int) -> str:
        """Takes and returns the text up to that index of the buffer."""
        piece = self.buffer[self.at : end]
        self.at = end
        self.last = piece[-1:] or self.last
        if self.record is not None:
            self.record.append(piece)
        return piece

    def take_next(self, size: int = 1) -> str:
        return self.take(self.at + size)

    def broken(self, problem: str) -> MalformedError:
        """An error that includes the position in the call up to which the text was read."""
        place = sum(map(len, self.record or ())) + 1
        return MalformedError(f"{problem} (at character {place} of the call)")

    def unexpected_error(self, expected: str, word: str = "") -> MalformedError:
        """An error about a word that was taken, or about the next character."""
        shown = word or self.buffer[self.at : self.at + 1]
        if not shown:
            return self.broken("the text ends inside the call")
        return self.broken(f"it needs {expected}, not {shown!r}")

    def peek(self) -> Generator[None, None, str]:
        """The next character, or "" at the end."""
        while self.at >= len(self.buffer) and not self.ended:
            yield
        return self.buffer[self.at : self.at + 1]

    def skip_space(self) -> Generator[None, None, str]:
        """Takes white space, which may be none, and returns it."""
        space, _ = yield from self._take_before(_NO_SPACE)
        return space

    def take_word(self) -> Generator[None, None, str]:
        """Takes the letters, digits, signs and dots that come next, which may be none."""
        word, _ = yield from self._take_before(_NO_WORD)
        if len(word) > MAX_WORD:
            raise self.broken(f"it has a number or word of more than {MAX_WORD} characters")
        return word

    def _take_before(self, end_marks: Marks) -> Generator[None, None, tuple[str, str]]:
        """As `until`, but also returns the text that it takes."""
        pieces: list[str] = []
        mark = yield from self.until(end_marks, pieces.append)
        return "".join(pieces), mark

    def starts_with(self, *strings: str) -> Generator[None, None, str]:
        """The string that comes next in the text, or "". Takes nothing."""
        return (yield from self.look_for(marks(*strings)))

    def look_for(self, candidates: Marks) -> Generator[None, None, str]:
        """`starts_with`, of marks."""
        while True:
            match = candidates.find(self, at_start=True)
            if match is None or not match.partial:
                return match.group() if match else ""
            yield

    def take_any(self, *strings: str) -> Generator[None, None, str]:
        """Takes white space, then takes and returns the string that comes next, or ""."""
        yield from self.skip_space()
        string = yield from self.starts_with(*strings)
        return self.take_next(len(string))

    def expect(self, *strings: str, expected: str = "") -> Generator[None, None, str]:
        """As `take_any`, but raises MalformedError if none of the strings comes next."""
        string = yield from self.take_any(*strings)
        if not string:
            raise self.unexpected_error(expected or " or ".join(strings))
        return string

    def until(self, end_marks: Marks, emit: Emit) -> Generator[None, None, str]:
        """Takes the text up to the first mark. Returns the mark without taking it. If there is
        none, takes all text and returns ""."""
        while True:
            match = end_marks.find(self)
            end = match.start() if match else len(self.buffer)
            if end > self.at:
                emit(self.take(end))
            if self.ended or (match and not match.partial):
                return match.group() if match else ""
            yield

    def collect(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Takes the text up to the first mark, and returns (the text, the mark). The mark is not
        taken. Raises MalformedError if there is none."""
        before, mark = yield from self._take_before(marks(*ends))
        if not mark:
            raise self.broken("the text ends inside the call")
        return before, mark
