"""Blocks of rows: computing on a few rows of a large table [S, T] at a time keeps temporaries small
and in caches."""

from __future__ import annotations

from collections.abc import Iterable

from agentevo.algorithms.lazy_torch import torch

BLOCK_TOKENS = 2**18
"""The number of tokens in a block, trained or not."""


def block_rows(width: int) -> int:
    """The number of rows of `width` tokens that make a block, at least 1."""
    return max(1, BLOCK_TOKENS // max(1, width))


def row_blocks(*tables: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Views of tables [S, T] or [S, 1], the same block of rows of each at a time, in order. The
    first table has T columns. There is at least one block."""
    rows = block_rows(tables[0].shape[1])
    return zip(*(torch.split(table, rows) for table in tables), strict=True)


def row_lengths(mask: torch.Tensor) -> torch.Tensor:
    """[S] float64: the number of true places in each row. (A sum over the whole mask at once would
    first widen a copy of it to int64.)"""
    return torch.cat([part.sum(1) for (part,) in row_blocks(mask)]).double()
