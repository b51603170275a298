"""Arranges the sequences of a token tree as rows, for models that compute rows
(models/compute/rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from agentevo.models.compute.rows import RowGroup
from agentevo.training.tree import TokenTree

MAX_PADDING = 0.2
"""The largest share of padding in a pass."""


class RowPasses(NamedTuple):
    """The passes that compute the output of R nodes."""

    groups: list[RowGroup]
    order: torch.Tensor
    """[R] int64: the place of each node in the concatenated outputs of the groups."""

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts the outputs [n, ...] of the groups together: [R, ...], in the order of the nodes."""
        return torch.cat(list(outputs))[self.order]


def row_passes(
    tree: TokenTree, nodes: np.ndarray, pads: bool, as_one_pass: bool, device: torch.device
) -> RowPasses:
    """The passes that compute the output of `nodes` [R]. Each sequence of the tree is a row. A
    shared node is computed in every row, and its output is taken from one of them, whose gradient
    is the node's. `pads`: whether rows of different length can share a pass. `as_one_pass`: all
    rows share one."""
    row_of_node = np.full(tree.num_nodes, -1)
    column_of_node = np.zeros(tree.num_nodes, dtype=np.int64)
    for row, path in enumerate(tree.paths):
        missing = np.flatnonzero(row_of_node[path] < 0)
        row_of_node[path[missing]] = row
        column_of_node[path[missing]] = missing

    rows = row_of_node[nodes]
    lengths = [len(path) for path in tree.paths]
    used = sorted(set(rows.tolist()), key=lengths.__getitem__)
    groups = []
    taken = []
    for members in [used] if as_one_pass else _alike(used, lengths, pads):
        width = max(lengths[row] for row in members)
        ids = np.zeros((len(members), width), dtype=np.int64)
        place_of_row = np.full(len(lengths), -1)
        for place, row in enumerate(members):
            ids[place, : lengths[row]] = tree.ids[tree.paths[row]]
            place_of_row[row] = place

        mine = np.flatnonzero(place_of_row[rows] >= 0)
        taken.append(mine)
        groups.append(
            RowGroup(
                torch.as_tensor(ids, device=device),
                torch.as_tensor(place_of_row[rows[mine]], device=device),
                torch.as_tensor(column_of_node[nodes[mine]], device=device),
            )
        )

    order = np.empty(len(nodes), dtype=np.int64)
    order[np.concatenate(taken)] = np.arange(len(nodes))
    return RowPasses(groups, torch.as_tensor(order, device=device))


def _alike(rows: list[int], lengths: list[int], pads: bool) -> list[list[int]]:
    """Groups rows, sorted by length, that share a pass."""
    groups: list[list[int]] = []
    total = 0
    for row in rows:
        length = lengths[row]
        padded = (len(groups[-1]) + 1) * length if groups else 0
        fits = (
            padded == total + length if not pads else total + length >= (1 - MAX_PADDING) * padded
        )
        if groups and fits:
            groups[-1].append(row)
            total += length
        else:
            groups.append([row])
            total = length

    return groups
