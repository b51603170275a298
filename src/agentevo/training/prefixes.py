"""Token sequences in sorted order, where the neighbours of each one share the longest beginning
with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SortedSequences:
    """S sequences; a beginning that several of them share belongs to neighbours, so the longest of
    a sequence with any one before it is that with its neighbour."""

    order: list[int]
    """[S]: the caller's number of each sequence."""
    tokens: list[np.ndarray]
    """[S]: the sequences in that order, int32."""
    shared: np.ndarray
    """[S] int64: the number of first tokens that each shares with the one before it; 0 for the
    first."""


def sort_sequences(
    sequences: Sequence[Sequence[int]] | Sequence[np.ndarray], *, merge: bool = True
) -> SortedSequences:
    """Sorts the sequences lexicographically, equal ones in the caller's order. Without `merge` they
    stay in the caller's order, and nothing counts as shared. Ids are compared as big-endian bytes,
    many times faster than as numbers and in the same order. Ids: 0 to 2^31 - 1."""
    tokens = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    shared = np.zeros(len(tokens), dtype=np.int64)
    if not merge:
        return SortedSequences(list(range(len(tokens))), tokens, shared)

    keys = [ids.astype(">i4").tobytes() for ids in tokens]
    order = sorted(range(len(tokens)), key=keys.__getitem__)
    tokens = [tokens[index] for index in order]
    for place in range(1, len(tokens)):
        shared[place] = common_prefix(tokens[place - 1], tokens[place])

    return SortedSequences(order, tokens, shared)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """The number of first entries in which two arrays agree."""
    size = min(len(first), len(second))
    differ = first[:size] != second[:size]
    place = int(differ.argmax()) if size else 0
    return place if size and differ[place] else size
