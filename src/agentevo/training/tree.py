"""Packed sequences as a token tree: what sequences share at their beginning is computed once.

`build_tree` sorts the sequences and walks them: each reuses the path of the one before it as far as they agree and adds nodes for the
rest. In that order nodes come out depth-first, and

    ids[path(s)] = sequence s,   position of a node = its depth,   a node attends to exactly the nodes of its path

hold by construction (tests/training/test_tree.py). Attention works in runs: the nodes that one sequence added (queries) against its whole
path (keys). Runs of similar size are computed together, padded only inside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from agentevo.inference.cache_attention import NEG_INF
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
    runs: list[tuple[int, int, np.ndarray]]
    """Per sequence that added nodes: first node, number of nodes, and its whole path."""

    @property
    def num_nodes(self) -> int:
        return len(self.ids)


def build_tree(sequences: Sequence[Sequence[int]] | Sequence[np.ndarray], *, merge: bool = True) -> TokenTree:
    """The tree of several non-empty token sequences; without `merge` they share nothing, each is a trunk of its own."""
    found = sort_sequences(sequences, merge=merge)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    runs: list[tuple[int, int, np.ndarray]] = []
    path, num_nodes = np.empty(0, dtype=np.int64), 0
    for index, tokens, shared in zip(found.order, found.tokens, found.shared.tolist(), strict=True):
        added = len(tokens) - shared
        path = np.concatenate([path[:shared], np.arange(num_nodes, num_nodes + added)])
        paths[index] = path
        if added:
            ids.append(tokens[shared:])
            positions.append(np.arange(shared, len(tokens)))
            runs.append((num_nodes, added, path))
            num_nodes += added
    return TokenTree(np.concatenate(ids).astype(np.int64), np.concatenate(positions), paths, runs)


@dataclass(eq=False)
class _Bucket:
    """Runs computed together: queries [B, Q] and keys [B, K] as node numbers, padding repeats node 0."""

    queries: torch.Tensor
    keys: torch.Tensor
    query_depth: torch.Tensor
    """[B, Q] place of each query in its path."""
    take: torch.Tensor
    """[n] flat places of the real queries."""
    nodes: torch.Tensor
    """[n] their nodes."""

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive [B, 1, Q * repeat, K]."""
        key = torch.arange(self.keys.shape[1], device=self.keys.device)
        seen = key[None, None, :] <= self.query_depth[:, :, None]
        if window is not None:
            seen &= key[None, None, :] > self.query_depth[:, :, None] - window
        mask = torch.zeros(seen.shape, dtype=dtype, device=key.device).masked_fill_(~seen, NEG_INF)
        return mask.repeat_interleave(repeat, dim=1).unsqueeze(1)


class TreeAttention:
    """The attention plan of one packed forward pass (see models/attention.py)."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.num_nodes = tree.num_nodes
        self.buckets = [_bucket(runs, device) for runs in _similar(tree.runs)]
        self.nodes = torch.cat([b.nodes for b in self.buckets])  # [N], every node once
        self.inverse = torch.empty_like(self.nodes)
        self.inverse[self.nodes] = torch.arange(len(self.nodes), device=device)
        self._masks: dict[tuple[int, int | None, int, torch.dtype], torch.Tensor] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """See AttentionPlan.attend: q [N, H, D], k and v [N, G, D] -> [N, H, D]."""
        num_heads, dim = q.shape[1:]
        groups = k.shape[1]
        repeat = num_heads // groups
        parts = []
        for index, bucket in enumerate(self.buckets):
            batch, num_queries = bucket.queries.shape
            rows = q.index_select(0, bucket.queries.reshape(-1)).view(batch, num_queries, groups, repeat, dim)
            rows = rows.transpose(1, 2).reshape(batch, groups, num_queries * repeat, dim)
            keys = k.index_select(0, bucket.keys.reshape(-1)).view(batch, -1, groups, dim).transpose(1, 2)
            values = v.index_select(0, bucket.keys.reshape(-1)).view(batch, -1, groups, dim).transpose(1, 2)
            key = (index, window, repeat, q.dtype)
            if key not in self._masks:
                self._masks[key] = bucket.mask(window, repeat, q.dtype)
            out = _softmax_attention(rows, keys, values, self._masks[key], scaling, softcap)
            out = out.view(batch, groups, num_queries, repeat, dim).transpose(1, 2).reshape(batch * num_queries, num_heads, dim)
            parts.append(out.index_select(0, bucket.take))
        return torch.cat(parts).index_select(0, self.inverse)


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = softcap * torch.tanh(torch.matmul(q, k.transpose(-1, -2)) * (scaling / softcap))
    return torch.matmul(torch.softmax(scores + mask, dim=-1), v)


def _similar(runs: list[tuple[int, int, np.ndarray]]) -> list[list[tuple[int, int, np.ndarray]]]:
    """Splits runs into buckets in which padding to the largest costs at most about half again as much attention."""
    buckets: list[list[tuple[int, int, np.ndarray]]] = []
    for run in sorted(runs, key=lambda r: (len(r[2]), r[1]), reverse=True):
        for bucket in buckets:
            queries, keys = max(r[1] for r in bucket), max(len(r[2]) for r in bucket)
            if 1.5 * run[1] + 8 >= queries >= run[1] and 1.5 * len(run[2]) + 8 >= keys:
                bucket.append(run)
                break
        else:
            buckets.append([run])
    return buckets


def _bucket(runs: list[tuple[int, int, np.ndarray]], device: torch.device) -> _Bucket:
    width, depth = max(r[1] for r in runs), max(len(r[2]) for r in runs)
    queries = np.zeros((len(runs), width), dtype=np.int64)
    keys = np.zeros((len(runs), depth), dtype=np.int64)
    query_depth = np.zeros((len(runs), width), dtype=np.int64)
    real = np.zeros((len(runs), width), dtype=bool)
    for row, (first, count, path) in enumerate(runs):
        queries[row, :count] = np.arange(first, first + count)
        keys[row, : len(path)] = path
        query_depth[row, :count] = np.arange(len(path) - count, len(path))
        real[row, :count] = True
    flat = real.reshape(-1)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    return _Bucket(tensor(queries), tensor(keys), tensor(query_depth), tensor(np.nonzero(flat)[0]), tensor(queries.reshape(-1)[flat]))
