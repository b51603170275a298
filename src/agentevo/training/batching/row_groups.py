"""Arranges the sequences of a token tree as rows, for models that compute rows
(models/compute/rows.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from agentevo.models.compute.rows import RowGroup
from agentevo.models.vision.keys import FeatureRows
from agentevo.training.batching.images import BatchImages
from agentevo.training.prefixes import common_prefix
from agentevo.training.tree import TokenTree

MAX_PADDING = 0.2
"""The largest share of padding in a pass."""
SMALLEST_SAVING = 128
"""The number of tokens that a pass over a shared prefix saves at least. A further pass costs about
as much as computing so many tokens again."""
SHORTEST = 2
"""The smallest number of tokens that continue from a state. Models compute a single one by another
function, for generation, which need not be differentiable."""


class RowPasses(NamedTuple):
    """The passes that compute the output of R nodes."""

    groups: list[RowGroup]
    order: torch.Tensor
    """[R] int64: the place of each node in the concatenated outputs of the groups."""
    images: list[list[FeatureRows]]
    """The features that each group reads, row by row."""
    nodes: list[np.ndarray]
    """The node [B, L] of each token of each group, -1 for padding."""

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts the outputs [n, ...] of the groups together: [R, ...], in the order of the nodes."""
        return torch.cat(list(outputs))[self.order]


class _Stretch(NamedTuple):
    """Tokens `start` to `stop` of a sequence, which one row of a pass computes."""

    sequence: int
    start: int
    stop: int
    parent: int | None
    """The number of the stretch from whose state this one continues."""
    is_parent: bool = False


def row_passes(
    tree: TokenTree,
    nodes: np.ndarray,
    *,
    pads: bool,
    shares: bool,
    all_rows: bool = False,
    as_one_pass: bool,
    device: torch.device,
    positions: np.ndarray | None = None,
    images: BatchImages | None = None,
) -> RowPasses:
    """The passes that compute the output of `nodes` [R]. Each sequence of the tree is a row. A node
    that several rows compute is taken from one of them, whose gradient is the node's. `pads`:
    whether rows of different length can share a pass. `shares`: whether rows can continue from the
    state of a prefix, which is then computed once. `all_rows`: whether rows from which no output is
    taken are computed too. `as_one_pass`: all rows are in one pass.
    `positions` [A, N] of the nodes; None if they are the depths. `images`: those of the nodes."""
    stretches = _divide(tree, shares and not as_one_pass)
    stretch_of_node = np.full(tree.num_nodes, -1)
    column_of_node = np.zeros(tree.num_nodes, dtype=np.int64)
    for number, stretch in enumerate(stretches):
        path = tree.paths[stretch.sequence][stretch.start : stretch.stop]
        missing = np.flatnonzero(stretch_of_node[path] < 0)
        stretch_of_node[path[missing]] = number
        column_of_node[path[missing]] = missing

    groups: list[RowGroup] = []
    images_of_groups: list[list[FeatureRows]] = []
    nodes_of_groups: list[np.ndarray] = []
    taken = []
    pass_of_stretch: dict[int | None, int] = {}
    used = set(range(len(stretches)) if all_rows else stretch_of_node[nodes].tolist())
    for members in _group(stretches, used, pads, as_one_pass):
        first = stretches[members[0]]
        place_of_stretch = np.full(len(stretches), -1)
        place_of_stretch[members] = np.arange(len(members))
        mine = np.flatnonzero(place_of_stretch[stretch_of_node[nodes]] >= 0)
        taken.append(mine)
        if first.is_parent:
            pass_of_stretch[members[0]] = len(groups)

        ids, paths = _padded_ids(tree, [stretches[m] for m in members])
        parts = [] if images is None else [images.feature_rows(nodes) for nodes in paths]
        images_of_groups.append(list(itertools.chain(*parts)))
        nodes_of_groups.append(_padded_nodes(paths, ids.shape[1]))
        groups.append(
            RowGroup(
                torch.as_tensor(ids, device=device),
                torch.as_tensor(place_of_stretch[stretch_of_node[nodes[mine]]], device=device),
                torch.as_tensor(column_of_node[nodes[mine]], device=device),
                parent=pass_of_stretch.get(first.parent),
                start=first.start,
                is_parent=first.is_parent,
                positions=_padded_positions(paths, ids.shape[1], positions, device),
                types=_types(tree, [stretches[m] for m in members], ids.shape[1], images, device),
            )
        )

    order = np.empty(len(nodes), dtype=np.int64)
    order[np.concatenate(taken)] = np.arange(len(nodes))
    places = torch.as_tensor(order, device=device)
    return RowPasses(groups, places, images_of_groups, nodes_of_groups)


def _divide(tree: TokenTree, shares: bool) -> list[_Stretch]:
    """The stretches that together compute all nodes, each after its parent. Sequences that others
    contain have none."""
    sequence_of_leaf = {
        int(path[-1]): sequence
        for sequence, path in enumerate(tree.paths)
        if tree.ends[path[-1]] == path[-1] + 1
    }
    # In the order of the tree, neighbours have the most nodes in common.
    sequences = [sequence_of_leaf[leaf] for leaf in sorted(sequence_of_leaf)]
    paths = [tree.paths[sequence] for sequence in sequences]
    common = np.zeros(len(paths), dtype=np.int64)
    if shares:
        common[1:] = [common_prefix(*pair) for pair in itertools.pairwise(paths)]

    stretches: list[_Stretch] = []
    # Neighbours `first` to `last`, of whose tokens the stretch `parent` computes the first `start`.
    divided: list[tuple[int, int, int, int | None]] = [(0, len(paths), 0, None)]
    while divided:
        first, last, start, parent = divided.pop()
        if last - first == 1:
            stretches.append(_Stretch(sequences[first], start, len(paths[first]), parent))
            continue

        stop = int(common[first + 1 : last].min())
        saving = (stop - start) * (last - first - 1)
        if stop - start >= SHORTEST and saving >= SMALLEST_SAVING:
            stretches.append(_Stretch(sequences[first], start, stop, parent, is_parent=True))
            start = stop
            parent = len(stretches) - 1

        cuts = first + 1 + np.flatnonzero(common[first + 1 : last] == stop)
        borders = [first, *cuts.tolist(), last]
        divided += [(*pair, start, parent) for pair in itertools.pairwise(borders)]

    return stretches


def _group(
    stretches: list[_Stretch], used: set[int], pads: bool, as_one_pass: bool
) -> list[list[int]]:
    """The numbers of the stretches of each pass, parents first. Only those of `used`, and their
    parents."""
    used = set(used)
    for number in reversed(range(len(stretches))):
        parent = stretches[number].parent
        if number in used and parent is not None:
            used.add(parent)

    groups = [[number] for number in sorted(used) if stretches[number].is_parent]
    lengths = [stretch.stop - stretch.start for stretch in stretches]
    siblings: dict[int | None, list[int]] = {}
    for number in sorted(used, key=lambda number: (lengths[number], number)):
        if not stretches[number].is_parent:
            siblings.setdefault(stretches[number].parent, []).append(number)

    for members in siblings.values():
        groups += [members] if as_one_pass else _alike(members, lengths, pads)

    return groups


def _padded_ids(tree: TokenTree, members: list[_Stretch]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The ids [B, L] int64, and the nodes of each row."""
    shortest = 0 if members[0].parent is None else SHORTEST
    width = max(shortest, *(stretch.stop - stretch.start for stretch in members))
    ids = np.zeros((len(members), width), dtype=np.int64)
    paths = [tree.paths[member.sequence][member.start : member.stop] for member in members]
    for place, path in enumerate(paths):
        ids[place, : len(path)] = tree.ids[path]
    return ids, paths


def _padded_nodes(paths: list[np.ndarray], width: int) -> np.ndarray:
    """[B, L] of rows with these nodes, -1 for padding."""
    padded = np.full((len(paths), width), -1)
    for row, nodes in enumerate(paths):
        padded[row, : len(nodes)] = nodes
    return padded


def _padded_positions(
    paths: list[np.ndarray], width: int, positions: np.ndarray | None, device: torch.device
) -> torch.Tensor | None:
    """[A, B, L] of rows with these nodes. Padding goes on counting from the last position, because
    transformers takes a row that counts anew for several texts."""
    if positions is None:
        return None

    padded = np.empty((len(positions), len(paths), width), dtype=np.int64)
    for row, nodes in enumerate(paths):
        padded[:, row, : len(nodes)] = positions[:, nodes]
        after = 1 + np.arange(width - len(nodes))
        padded[:, row, len(nodes) :] = positions[:, nodes[-1:]] + after
    return torch.as_tensor(padded, device=device)


def _types(
    tree: TokenTree,
    members: list[_Stretch],
    width: int,
    images: BatchImages | None,
    device: torch.device,
) -> torch.Tensor | None:
    """[B, start + L]: the types of the tokens of the rows, and of those before them."""
    if images is None:
        return None

    types = np.zeros((len(members), members[0].start + width), dtype=np.int64)
    for row, member in enumerate(members):
        nodes = tree.paths[member.sequence][: member.stop]
        types[row, : len(nodes)] = images.image_of_node[nodes] >= 0
    return torch.as_tensor(types, device=device)


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
