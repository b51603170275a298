"""Attention over a token tree, without padding and without a mask of all pairs, so memory grows
with the number of nodes and not with its square.

Nodes are in depth-first order, so those below a node follow it without a gap. An unbranched stretch
of the tree (a segment) is therefore computed in two steps: its own nodes, BLOCK queries at a time,
and all nodes below it at once, which see all of it. Small subtrees are computed in batches, with a
mask, because a kernel call costs more than they do. The parts of a node are merged by their
log-sum-exp (attention_kernels.py), and an attention sink is a part with a value of zeros. Chunks
cut a segment into shorter ones. The first step could use a causal kernel, but PyTorch's kernel for
CPUs also computes the hidden half. On a CUDA device, FlexAttention computes everything
(flex_tree.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from agentevo.models.compute.routers import Routing
from agentevo.models.compute.windows import Chunk, Window, first_seen, narrow
from agentevo.runtime.devices import compiles
from agentevo.training.kernels.attention_kernels import HIDDEN, Flash, Kernel, Math
from agentevo.training.kernels.flex_tree import FlexTree
from agentevo.training.tree import TokenTree, TreeSegment, segments

BLOCK = 128
"""The number of queries of a segment that are computed at once. Also the most nodes of a subtree
that is computed as a whole, with a mask."""


@dataclass(eq=False)
class _Batch:
    """Small subtrees of similar size, each padded to n nodes by repeating its first node."""

    nodes: torch.Tensor
    """[B * n]"""
    visible: torch.Tensor
    """[B, 1, n, n] bool, query by key."""
    real: torch.Tensor
    """The flat indices of the real nodes, without padding."""
    distinct: torch.Tensor
    """The nodes at those places."""


class _AttentionBlock(NamedTuple):
    """Queries that attend to keys."""

    rows: slice | torch.Tensor
    keys: slice
    visible: torch.Tensor | None
    """[1, 1, Q, K] bool; None if all keys are visible."""


@dataclass(eq=False)
class _TreeLayout:
    """Which queries attend to which keys, under one window."""

    batches: list[_Batch] = field(default_factory=list)
    within: list[_AttentionBlock] = field(default_factory=list)
    """Queries of a segment that attend to the segment itself."""
    below: list[_AttentionBlock] = field(default_factory=list)
    """Queries below a segment that attend to the segment."""


class TreeAttention:
    """The attention plan of one packed forward pass (see models/compute/attention.py)."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.tree = tree
        self.device = device
        self.routing: Routing | None = None
        """Receives the chosen experts (models/compute/routers.py)."""
        self._deepest = int(tree.positions.max())
        self.flex = FlexTree(tree, device) if compiles(device.type) else None
        self._layouts: dict[Window, _TreeLayout] = {}
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: Window,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan.attend: q [N, H, D], k and v [N, G, D], sinks [H] -> [N, H, D],
        differentiable once."""
        window = narrow(window, self._deepest)
        if self.flex is not None:
            return self.flex.attend(q, k, v, scaling, window, softcap, sinks)
        if window not in self._layouts:
            self._layouts[window] = lay_out(self.tree, window, self.device)

        kernel = (
            Flash(scaling) if softcap is None and q.device.type == "cpu" else Math(scaling, softcap)
        )
        out: torch.Tensor = _Attention.apply(q, k, v, sinks, self, self._layouts[window], kernel)
        return out

    def mask(self, visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The additive mask. It is created once for all layers, and once for all views of the same
        rows."""
        if visible is None:
            return None

        base = visible if visible._base is None else visible._base
        key = (id(base), dtype)
        if key not in self._masks:
            self._masks[key] = torch.zeros(
                base.shape, dtype=dtype, device=base.device
            ).masked_fill_(~base, HIDDEN)

        return self._masks[key].as_strided(
            visible.shape, visible.stride(), visible.storage_offset()
        )


def lay_out(tree: TokenTree, window: Window, device: torch.device) -> _TreeLayout:
    """The layout under a window."""
    layout = _TreeLayout()
    small: list[tuple[int, int]] = []
    long: list[tuple[int, int]] = []
    done = 0
    for segment in segments(tree):
        if segment.first < done:
            continue  # inside a small subtree

        if segment.end - segment.first <= BLOCK:
            small.append((segment.first, segment.end))
            done = segment.end
            continue

        for first, last in _stretches(tree, segment, window):
            (small if last - first <= BLOCK else long).append((first, last))
        if segment.end > segment.last:
            layout.below += _below(tree, segment, window, device)

    layout.within = _own(long, None if isinstance(window, Chunk) else window, device)
    layout.batches = [_batch(tree, group, window, device) for group in _similar(small)]
    return layout


def _stretches(tree: TokenTree, segment: TreeSegment, window: Window) -> list[tuple[int, int]]:
    """The segment's parts that attend only to themselves: one for each chunk, otherwise all."""
    borders = [segment.first, segment.last]
    if isinstance(window, Chunk):
        start = int(tree.positions[segment.first])
        ahead = range(window.size - start % window.size, segment.last - segment.first, window.size)
        borders[1:1] = [segment.first + step for step in ahead]
    return list(itertools.pairwise(borders))


def _own(
    ranges: list[tuple[int, int]], window: int | None, device: torch.device
) -> list[_AttentionBlock]:
    """Nodes of unbranched stretches, each of which attends to all before it. All masks are views of
    one mask."""
    if not ranges:
        return []

    back = max(last - first for first, last in ranges)
    back = back if window is None else min(back, window - 1)
    row = torch.arange(BLOCK, device=device)[:, None]
    column = torch.arange(back + BLOCK, device=device)[None, :] - back
    visible = column <= row if window is None else (column <= row) & (row - column < window)
    blocks = []
    for first, last in ranges:
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            start_of_keys = max(first, start - back)
            part = visible[: stop - start, back - (start - start_of_keys) : back + stop - start]
            blocks.append(
                _AttentionBlock(slice(start, stop), slice(start_of_keys, stop), part[None, None])
            )

    return blocks


def _below(
    tree: TokenTree, segment: TreeSegment, window: Window, device: torch.device
) -> list[_AttentionBlock]:
    """The nodes below a segment that see part of the segment, with that part. Empty if none
    does."""
    if window is None:
        return [
            _AttentionBlock(
                slice(segment.last, segment.end), slice(segment.first, segment.last), None
            )
        ]

    depth = tree.positions
    last_depth = int(depth[segment.last - 1])
    hidden = first_seen(last_depth + 1, window) - int(depth[segment.first])
    keys = slice(segment.first + max(0, hidden), segment.last)
    firsts = first_seen(depth[segment.last : segment.end], window)
    near = np.flatnonzero(firsts <= last_depth)
    if not len(near):
        return []

    visible = torch.as_tensor(depth[keys][None, :] >= firsts[near][:, None], device=device)
    rows = torch.as_tensor(segment.last + near, device=device)
    return [_AttentionBlock(rows, keys, visible[None, None])]


def _similar(ranges: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Splits ranges of nodes into groups in which padding to the longest at most doubles the
    attention."""
    groups: list[list[tuple[int, int]]] = []
    for nodes in sorted(ranges, key=lambda r: r[1] - r[0], reverse=True):
        if groups and groups[-1][0][1] - groups[-1][0][0] <= 1.4 * (nodes[1] - nodes[0]) + 4:
            groups[-1].append(nodes)
        else:
            groups.append([nodes])
    return groups


def _batch(
    tree: TokenTree, ranges: list[tuple[int, int]], window: Window, device: torch.device
) -> _Batch:
    firsts = np.array([first for first, _ in ranges])[:, None]
    sizes = np.array([end - first for first, end in ranges])[:, None]
    place = np.arange(sizes.max())[None, :]
    real = place < sizes
    nodes = firsts + np.where(real, place, 0)
    visible = (nodes[:, None, :] <= nodes[:, :, None]) & (
        nodes[:, :, None] < tree.ends[nodes][:, None, :]
    )
    if window is not None:
        depth = tree.positions[nodes]
        visible &= depth[:, None, :] >= first_seen(depth, window)[:, :, None]

    visible &= real[:, None, :]
    visible |= (
        ~real[:, :, None] & (place == 0)[:, None, :]
    )  # a padding row must see something, otherwise its numbers are not finite

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    return _Batch(
        tensor(nodes.reshape(-1)),
        tensor(visible).unsqueeze(1),
        tensor(np.flatnonzero(real)),
        tensor(nodes[real]),
    )


class _Attention(torch.autograd.Function):
    """q [N, H, D], k and v [N, G, D], sinks [H] or None -> [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: TreeAttention,
        layout: _TreeLayout,
        kernel: Kernel,
    ) -> torch.Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(q.shape, dtype=exact, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=exact, device=q.device)

        # Step 1: long segments, each block of queries over the segment's nodes up to it.
        for rows, keys, visible in layout.within:
            part_out, sums = kernel.forward(
                _heads(q[rows]), _heads(k[keys]), _heads(v[keys]), plan.mask(visible, q.dtype)
            )
            out[rows] = _rows(part_out)
            lse[rows] = _rows(sums)

        # Step 2: small subtrees, batches of similar size, each whole under its mask.
        for batch in layout.batches:
            part_out, sums = kernel.forward(
                _taken(q, batch),
                _taken(k, batch),
                _taken(v, batch),
                plan.mask(batch.visible, q.dtype),
            )
            for target, part in ((out, part_out), (lse, sums)):
                target[batch.distinct] = part.transpose(1, 2).flatten(0, 1)[batch.real].to(exact)

        # Step 3: nodes below a segment over the segment, merged into what they have so far.
        for rows, keys, visible in layout.below:
            part_out, sums = kernel.forward(
                _heads(q[rows]), _heads(k[keys]), _heads(v[keys]), plan.mask(visible, q.dtype)
            )
            _merge(out, lse, rows, _rows(part_out), _rows(sums))

        # Step 4: the sinks, which only add to the denominator.
        if sinks is not None:
            out *= torch.sigmoid(lse - sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))

        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = plan, layout, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        plan, layout, kernel = ctx.how
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        # Parts need only the output and log-sum-exp over all keys, so they may come in any order.
        for rows, keys, visible in (*layout.within, *layout.below):
            at = (rows, rows, keys, keys, rows, rows)
            part_inputs = [
                _heads(x[where]) for x, where in zip((grad, q, k, v, out, lse), at, strict=True)
            ]
            gradients = kernel.backward(*part_inputs, mask=plan.mask(visible, q.dtype))
            for total, where, part_grad in zip(grads, (rows, keys, keys), gradients, strict=True):
                total[where] += _rows(part_grad)

        for batch in layout.batches:
            above = grad.new_zeros(len(batch.nodes), *grad.shape[1:]).index_copy_(
                0, batch.real, grad[batch.distinct]
            )
            above = above.view(len(batch.visible), -1, *grad.shape[1:]).transpose(
                1, 2
            )  # no gradient comes back through padding
            gradients = kernel.backward(
                above,
                *(_taken(x, batch) for x in (q, k, v, out, lse)),
                mask=plan.mask(batch.visible, q.dtype),
            )
            for total, part_grad in zip(grads, gradients, strict=True):
                total[batch.distinct] += part_grad.transpose(1, 2).flatten(0, 1)[batch.real]

        grad_sinks = None
        if ctx.needs_input_grad[3]:
            # The sink's value is zeros, so its score's gradient is -p (grad . out).
            along = (grad * out).sum(-1, dtype=lse.dtype)
            grad_sinks = -((sinks - lse).exp() * along).sum(0).to(sinks.dtype)

        return (*grads, grad_sinks, None, None, None)


def _heads(rows: torch.Tensor) -> torch.Tensor:
    """[n, H, ...] -> [1, H, n, ...]"""
    return rows.transpose(0, 1).unsqueeze(0)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """The inverse of _heads."""
    return heads[0].transpose(0, 1)


def _taken(x: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """[N, H, ...] -> [B, H, n, ...]"""
    return x.index_select(0, batch.nodes).view(len(batch.visible), -1, *x.shape[1:]).transpose(1, 2)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: slice | torch.Tensor,
    part_out: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Merges another part's outputs [n, H, D] and log-sum-exps [n, H] into these rows."""
    share = torch.sigmoid(sums - lse[rows]).unsqueeze(-1)
    out[rows] = torch.lerp(out[rows], part_out.to(out.dtype), share)
    lse[rows] = torch.logaddexp(lse[rows], sums)
