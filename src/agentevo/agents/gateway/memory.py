"""The answers of one session that an API keeps, so that a client can name one instead of sending it
back. The memory is bounded: beyond its limits the oldest answers are dropped."""

from __future__ import annotations

from typing import Any

MAX_KEPT = 10_000
"""Answers that one session keeps."""
MAX_CHARACTERS = 2**26
"""The maximum characters of all of them."""


class Memory:
    """See the module. It belongs to the event loop of the gateway."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, int]] = {}
        self._num_characters = 0

    def keep(self, name: str, value: Any, num_characters: int) -> None:
        """Keeps a value of about so many characters under a name that is new."""
        self._kept[name] = (value, num_characters)
        self._num_characters += num_characters
        while len(self._kept) > MAX_KEPT or self._num_characters > MAX_CHARACTERS:
            oldest = next(iter(self._kept))
            self._num_characters -= self._kept.pop(oldest)[1]

    def forget(self, name: str) -> None:
        """Drops a kept name."""
        self._num_characters -= self._kept.pop(name)[1]

    def find(self, name: str) -> Any | None:
        """The value under the name; None if there is none, or it was dropped."""
        return self._kept.get(name, (None,))[0]
