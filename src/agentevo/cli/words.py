"""The words of a command line, checked before any command looks at them: what no file system, no
terminal and no database can hold is refused in one place."""

from __future__ import annotations

from collections.abc import Sequence

from agentevo.errors import ConfigError
from agentevo.paths import name_problem

MAX_LENGTH = 100_000
"""Characters in one word; `execve` takes 131,072 bytes."""


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError for a word that is no text, or that can't be a path where it may be one:
    overrides (`key=value`) and URLs are looked at where they are read."""
    for number, word in enumerate(words, start=1):
        problem = _problem(word)
        if problem:
            shown = word if len(word) <= 60 else f"{word[:57]}..."
            raise ConfigError(f"argument {number}, {shown!a}, {problem}")


def _problem(word: str) -> str:
    """What is wrong with it and what to do, or empty."""
    if len(word) > MAX_LENGTH:
        return f"has {len(word):,} characters: put what is so long into the recipe"

    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8: rename the file, or write the text in UTF-8"

    if "=" in word or "://" in word:
        return "has a NUL character: remove it" if "\0" in word else ""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        return "has a control character: remove it"

    return name_problem(word)
