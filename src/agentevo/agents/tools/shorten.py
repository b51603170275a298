"""Shortens a long result to its head and its tail, with a note about the omission between them."""

from __future__ import annotations

HEAD = 0.7
"""The head's share of the kept characters."""


def shorten_text(text: str, longest: int) -> str:
    """The text, or at most `longest` characters of it and a line about the omission. Halves of
    surrogate pairs, which no tokenizer accepts, become question marks."""
    if len(text) <= longest:
        return text if text.isascii() else text.encode("utf-8", "replace").decode()
    head = int(longest * HEAD)
    tail = longest - head
    left_out = len(text) - longest
    notice = f"\n[{left_out:,} characters are left out here]\n"
    return f"{text[:head]}{notice}{text[-tail:]}".encode("utf-8", "replace").decode()
