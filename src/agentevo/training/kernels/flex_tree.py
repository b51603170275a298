"""Attention over a token tree on a GPU. It uses PyTorch's FlexAttention, with a block mask that is
computed from the tree and not from all pairs of nodes. If a pass has only long texts that share
nothing, it uses PyTorch's flash attention, which is faster.

Node q sees node k exactly if k <= q < ends[k] (training/tree.py). So for a block of keys and a
later block of queries: some query may see some key if the largest end of the keys is after the
first query, and all queries see all keys if the smallest end is after the last query. 128K nodes
are 1,024 blocks, and their mask takes a few numpy operations on 1,024 x 1,024 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentevo.models.compute.windows import Window, first_seen
from agentevo.runtime.devices import compiles
from agentevo.training.tree import TokenTree, segments

BLOCK = 128
"""The number of nodes in a block, FlexAttention's default. Nodes are padded to a multiple of it. A
padding node sees only itself."""


MIN_HEAD_DIM = 16
"""The smallest head dimension of FlexAttention's kernels."""
LONG_TEXT = 2048
"""The smallest number of tokens for which a text is worth a separate kernel call."""


class FlexTree:
    """The tree on its device, and its block mask for every window of a model's layers."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.num_nodes = tree.num_nodes
        padded = np.arange(tree.num_nodes, -(-tree.num_nodes // BLOCK) * BLOCK)
        self.ends = np.concatenate([tree.ends, padded + 1])
        self.depth = np.concatenate([tree.positions, np.zeros_like(padded)])
        self.device = device
        self._masks: dict[Window, BlockMask] = {}
        self.texts = _long_texts(tree)
        """The texts if flash attention can compute all of them, else empty."""

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
        """See AttentionPlan.attend: q [N, H, D], k and v [N, G, D], sinks [H] -> [N, H, D]."""
        if self.texts and window is None and softcap is None and sinks is None:
            outputs = [_flash(q[text], k[text], v[text], scaling) for text in self.texts]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        if window not in self._masks:
            self._masks[window] = self.block_mask(window)

        num_padding = len(self.ends) - self.num_nodes
        dim = q.shape[-1]
        dim_padding = max(0, MIN_HEAD_DIM - dim)  # zeros add nothing to scores and outputs
        heads = [
            (F.pad(x, (0, dim_padding, 0, 0, 0, num_padding)) if num_padding or dim_padding else x)
            .transpose(0, 1)
            .unsqueeze(0)
            for x in (q, k, v)
        ]
        out = _attention_function(q.device.type)(
            *heads,
            score_mod=None if softcap is None else _cap_scores(softcap),
            block_mask=self._masks[window],
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
            return_lse=sinks is not None,
        )
        if sinks is not None:
            out, lse = out
            share = torch.sigmoid(lse - sinks[:, None])  # [1, H, N]
            out = (out * share.unsqueeze(-1)).to(out.dtype)

        rows: torch.Tensor = out[0].transpose(0, 1)[: self.num_nodes, :, :dim]
        return rows

    def block_mask(self, window: Window) -> BlockMask:
        partly_visible, fully_visible = self._blocks(window)
        counts, indices = _order_blocks(partly_visible & ~fully_visible, self.device)
        full_counts, full_indices = _order_blocks(fully_visible, self.device)
        ends, depth, firsts = (
            torch.as_tensor(x, dtype=torch.int32, device=self.device)
            for x in (self.ends, self.depth, self._firsts(window))
        )
        block_mask: BlockMask = BlockMask.from_kv_blocks(
            counts,
            indices,
            full_counts,
            full_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=_is_on_path(ends) if window is None else _is_near(ends, depth, firsts),
            seq_lengths=(len(self.ends), len(self.ends)),
        )
        return block_mask

    def _firsts(self, window: Window) -> np.ndarray:
        """The first depth that each node sees."""
        return np.zeros_like(self.depth) if window is None else first_seen(self.depth, window)

    def _blocks(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Two masks, [queries / BLOCK, keys / BLOCK] bool: blocks in which some query may see some
        key, and blocks in which all queries see all keys."""
        count = len(self.ends) // BLOCK
        ends = self.ends.reshape(count, BLOCK)
        depth = self.depth.reshape(count, BLOCK)
        first_query = np.arange(count)[:, None] * BLOCK
        is_later = np.arange(count)[:, None] > np.arange(count)[None, :]
        partly_visible = (is_later & (ends.max(1)[None, :] > first_query)) | np.eye(
            count, dtype=bool
        )
        fully_visible = is_later & (ends.min(1)[None, :] >= first_query + BLOCK)
        if window is not None:
            firsts = self._firsts(window).reshape(count, BLOCK)
            partly_visible &= firsts.min(1)[:, None] <= depth.max(1)[None, :]
            fully_visible &= firsts.max(1)[:, None] <= depth.min(1)[None, :]

        return partly_visible, fully_visible


def _long_texts(tree: TokenTree) -> list[slice]:
    """The texts of a tree without branches if all of them are long, else empty."""
    tree_segments = segments(tree)
    if tree.num_nodes < LONG_TEXT * len(tree_segments) or any(
        segment.end > segment.last for segment in tree_segments
    ):
        return []
    return [slice(segment.first, segment.last) for segment in tree_segments]


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of one text: q [n, H, D], k and v [n, G, D] -> [n, H, D]."""
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def _order_blocks(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[Q, K] bool -> counts [1, 1, Q] of the true ones, and indices [1, 1, Q, K], the true ones
    first, as BlockMask expects them."""
    indices = np.argsort(~blocks, axis=1, kind="stable")

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, dtype=torch.int32, device=device)[None, None]

    return tensor(blocks.sum(1)), tensor(indices)


def _is_on_path(ends: torch.Tensor) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask_mod: whether a query sees a key without a window."""

    def is_on_path(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    return is_on_path


def _is_near(
    ends: torch.Tensor, depth: torch.Tensor, firsts: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """The same with a window. `firsts`: the first depth that each query sees."""
    is_on_path = _is_on_path(ends)

    def is_near(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return is_on_path(batch, head, query, key) & (depth[key] >= firsts[query])

    return is_near


@cache
def _cap_scores(softcap: float) -> Callable[..., torch.Tensor]:
    """FlexAttention's score_mod for softcap * tanh(score / softcap). There is one function per
    softcap, so that it is compiled once."""

    def cap(
        score: torch.Tensor,
        batch: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _attention_function(device: str) -> Callable[..., Any]:
    """FlexAttention for a device, compiled if the device supports it. Without compilation,
    FlexAttention computes all scores at once, which is useful only for tests without a GPU."""
    attention: Any = torch.compile(flex_attention) if compiles(device) else flex_attention
    return attention
