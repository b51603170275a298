"""Blocks of rows: a large table [S, T] is worked on a few rows at a time, so that what is needed in
between stays small and in caches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BLOCK_TOKENS = 2**18
"""Tokens, trained or not, of a block."""


def block_rows(width: int) -> int:
    """How many rows of `width` tokens make a block, at least 1."""
    return max(1, BLOCK_TOKENS // max(1, width))


def row_blocks(*tables: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """All rows of tables [S, T] or [S, 1] in order, a block of each at a time; views. The first has
    T columns. At least one block."""
    rows = block_rows(tables[0].shape[1])
    return zip(*(torch.split(table, rows) for table in tables), strict=True)


def row_lengths(mask: torch.Tensor) -> torch.Tensor:
    """Number of True places of each row, [S] float64. A sum over the whole mask at once would first
    widen a copy of it to int64."""
    return torch.cat([part.sum(1) for (part,) in row_blocks(mask)]).double()
