"""Packed sequences as a token tree: the beginnings that sequences share are computed once.

`build_tree` sorts the sequences and walks them: each one reuses the path of its predecessor as far
as they agree, and adds nodes for the rest. In that order nodes come out depth-first, and

    ids[path(s)] = sequence s,   position of a node = its depth,
    a node attends to exactly the nodes of its path

hold by construction (tests/training/test_tree.py). The nodes below a node follow it without a gap,
so node k is on the path of node q exactly when k <= q < ends[k].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agentevo.training.prefixes import sort_sequences


@dataclass(eq=False)
class TokenTree:
    """N nodes for S sequences."""

    ids: np.ndarray
    """[N] int64 token of each node."""
    positions: np.ndarray
    """[N] int64 depth of each node."""
    paths: list[np.ndarray]
    """Per sequence, in the caller's order: its nodes from the root, int64."""
    ends: np.ndarray
    """[N] int64 one past the last node below each node."""

    @property
    def num_nodes(self) -> int:
        return len(self.ids)


def build_tree(
    sequences: Sequence[Sequence[int]] | Sequence[np.ndarray], *, merge: bool = True
) -> TokenTree:
    """The tree of several non-empty token sequences; without `merge` they share nothing, each is a
    trunk of its own."""
    sequences_sorted = sort_sequences(sequences, merge=merge)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []

    paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    branch_ends: list[tuple[np.ndarray, int]] = []
    path = np.empty(0, dtype=np.int64)
    num_nodes = 0
    for index, tokens, shared in zip(
        sequences_sorted.order,
        sequences_sorted.tokens,
        sequences_sorted.shared.tolist(),
        strict=True,
    ):
        added = len(tokens) - shared
        branch_ends.append((path[shared:], num_nodes))
        path = np.concatenate([path[:shared], np.arange(num_nodes, num_nodes + added)])
        paths[index] = path

        if added:
            ids.append(tokens[shared:])
            positions.append(np.arange(shared, len(tokens)))
            num_nodes += added

    ends = np.full(num_nodes, num_nodes, dtype=np.int64)
    for nodes, end in branch_ends:
        ends[nodes] = end

    return TokenTree(np.concatenate(ids).astype(np.int64), np.concatenate(positions), paths, ends)


class TreeSegment(NamedTuple):
    """Nodes `first` to `last` (one past it), each but the last with the next as its only child;
    below them, the nodes up to `end`."""

    first: int
    last: int
    end: int


def segments(tree: TokenTree) -> list[TreeSegment]:
    """The tree as its unbranched stretches, in the order of nodes."""
    goes_on = (np.diff(tree.positions) == 1) & (np.diff(tree.ends) == 0)
    lasts = np.append(np.flatnonzero(~goes_on) + 1, tree.num_nodes)
    firsts = np.append(0, lasts[:-1])
    return [
        TreeSegment(*map(int, bounds))
        for bounds in zip(firsts, lasts, tree.ends[firsts], strict=True)
    ]
