"""How far back along its own sequence a token sees. Only positions decide, so a window holds in a
packed row and in a tree of shared prefixes as in the sequence alone."""

from __future__ import annotations

from typing import Any, NamedTuple


class Chunk(NamedTuple):
    """Positions are cut into chunks of this size, and a token sees those of its own chunk
    (Llama 4)."""

    size: int


Window = int | Chunk | None
"""The number of tokens that a token sees, itself included; or its chunk; None for all."""


def first_seen(positions: Any, window: int | Chunk) -> Any:
    """The first position that a token at each of `positions` sees: a number, or integers as an
    array or tensor. Negative if a window reaches beyond the first token."""
    if isinstance(window, Chunk):
        return positions // window.size * window.size
    return positions - window + 1


def narrow(window: Window, deepest: int) -> Window:
    """The window, or None if it hides nothing in sequences whose last position is `deepest`."""
    return None if window is None or first_seen(deepest, window) <= 0 else window


def num_pairs(length: int, window: Window) -> int:
    """The number of pairs of a token and one that it sees, in a sequence of `length` tokens."""
    if isinstance(window, Chunk):
        whole, rest = divmod(length, window.size)
        return (whole * window.size * (window.size + 1) + rest * (rest + 1)) // 2
    short = length if window is None else min(length, window)
    return short * (short + 1) // 2 + (length - short) * short
