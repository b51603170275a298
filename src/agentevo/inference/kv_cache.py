"""Key-value memory of the embedded engine, and the attention that reads it.

Layout: per layer one buffer [slots, Hkv, capacity, D]; a sequence owns one slot. Shared prefixes lie outside of the slots, once each, as
`PrefixSegment`s. A sequence either copies a short prefix into its slot, or refers to a long one: then its queries meet the segment together
with those of all other sequences that refer to it, as one matrix product, and the two parts of the softmax are joined by their log-sum-exp
(cascade attention, as in Hydragen, arXiv 2402.05099).

Invariant: a sequence's visible keys are segment[0:offset] + slot[0:length], in the order of positions; `offset` is 0 without a reference.
Memory: slots x capacity + tokens of the segments <= the budget; `resize` compacts, so slots in use are always movable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

NEG_INF = float("-inf")
FEW_QUERIES = 16
"""Up to so many query rows of a sequence, plain matrix products are as fast as PyTorch's fused attention on a CPU, or
faster (`benchmarks/passes.py`)."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention and, if asked for, its log-sum-exp.

    q [B, G, Q, D], k and v [B, G, K, D], mask [B, 1, Q, K] additive or None -> out [B, G, Q, D], lse [B, G, Q]. Every row must see a key.
    """
    if q.device.type == "cpu" and softcap is None and q.dtype == k.dtype and q.shape[2] > FEW_QUERIES:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scaling)
        return out, lse
    scores = torch.matmul(q.float() * scaling, k.float().transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask.float()
    if not with_lse:
        return torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(v.dtype), None
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, v.float()).div_(total).to(v.dtype), (top + total.log()).squeeze(-1)


@dataclass(eq=False)
class PrefixSegment:
    """Keys and values of a prefix that several sequences share, computed once."""

    ids: list[int]
    keys: list[torch.Tensor]
    """Per layer [Hkv, len(ids), D]."""
    values: list[torch.Tensor]
    users: int = 0
    """Live sequences that refer to it; 0 may be dropped."""
    last_used: int = 0


@dataclass(eq=False)
class Rows:
    """Sequences that a step computes together: the same number of query tokens each, after padding.

    `tokens` [B, Q] are places in the step's flat token row (padding repeats a real one), `lengths` [B] the keys in the slot after this
    step, `queries` [B] how many of the Q are real.
    """

    slots: torch.Tensor
    """[B]"""
    tokens: torch.Tensor
    queries: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    first_slot: int | None
    """When set, slots are exactly first_slot .. first_slot + B - 1, so that the buffers are viewed instead of copied."""
    take_rows: torch.Tensor
    """[n] flat places b * Q + i of the real queries, in the order of `take_tokens`."""
    take_tokens: torch.Tensor
    """[n] the places in the step's token row that these queries are."""
    in_order: bool
    """One query per sequence, and exactly the step's tokens in their order: nothing to gather or to put back."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B, 1, Q * repeat, K]: causal at the end of each sequence, and `window` back. One per window, kept for all
        layers."""
        if window not in self._masks:
            num_queries = self.tokens.shape[1]
            key = torch.arange(self.max_length, device=self.lengths.device)  # [K]
            query = self.lengths[:, None] - self.queries[:, None] + torch.arange(num_queries, device=key.device)  # [B, Q] place in the slot
            query = torch.minimum(query, self.lengths[:, None] - 1).clamp_min(0)
            seen = key[None, None, :] <= query[:, :, None]
            if window is not None:
                seen &= key[None, None, :] > query[:, :, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=key.device).masked_fill_(~seen, NEG_INF)
            self._masks[window] = mask.repeat_interleave(repeat, dim=1).unsqueeze(1)
        return self._masks[window]


@dataclass(eq=False)
class SharedRows:
    """Query tokens that all see one whole prefix segment."""

    segment: PrefixSegment
    tokens: torch.Tensor
    """[n] places in the step's flat token row."""
    positions: torch.Tensor
    """[n] positions of those tokens in their sequences, for sliding windows."""
    every: bool
    """They are the whole row in its order: nothing to gather or to put back."""


class KVCache:
    """The slots' buffers. Layers appear as the first forward pass meets them."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.num_slots = 0
        self.capacity = 0

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of one layer; `like` [T, Hkv, D] gives shape, type and device for a new one."""
        while len(self.keys) <= index:
            shape = (self.num_slots, like.shape[1], self.capacity, like.shape[2])
            self.keys.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
            self.values.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        return self.keys[index], self.values[index]

    def resize(self, num_slots: int, capacity: int, used: list[tuple[int, int]]) -> dict[int, int]:
        """New buffers that keep the `used` slots, given as (slot, length); returns old slot -> new slot (0, 1, ... in the given order)."""
        for buffers in (self.keys, self.values):
            for index, old in enumerate(buffers):
                new = torch.zeros((num_slots, old.shape[1], capacity, old.shape[3]), dtype=old.dtype, device=old.device)
                for target, (slot, length) in enumerate(used):
                    new[target, :, :length] = old[slot, :, :length]
                buffers[index] = new
        self.num_slots, self.capacity = num_slots, capacity
        return {slot: target for target, (slot, _) in enumerate(used)}

    def cut_segment(self, slot: int, ids: list[int]) -> PrefixSegment:
        """A copy of the slot's first len(ids) keys and values."""
        size = len(ids)
        return PrefixSegment(ids, [k[slot, :, :size].clone() for k in self.keys], [v[slot, :, :size].clone() for v in self.values])

    def paste_segment(self, slot: int, segment: PrefixSegment, length: int) -> None:
        """Copies the first `length` tokens of the segment to the front of the slot."""
        for layer, (k, v) in enumerate(zip(segment.keys, segment.values, strict=True)):
            self.keys[layer][slot, :, :length] = k[:, :length]
            self.values[layer][slot, :, :length] = v[:, :length]


class CacheAttention:
    """The plan of one engine step: writes the new keys and values, then lets every new token see its own sequence."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, places: torch.Tensor, rows: list[Rows], shared: list[SharedRows]) -> None:
        self.cache = cache
        self.slots, self.places = slots, places  # [T] each: the slot of a token and its place there
        self.rows, self.shared = rows, shared

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """See AttentionPlan.attend: q [T, H, D] -> [T, H, D]."""
        keys, values = self.cache.layer(layer, k)
        keys[self.slots, :, self.places] = k
        values[self.slots, :, self.places] = v
        num_tokens, num_heads, dim = q.shape
        groups = k.shape[1]
        repeat = num_heads // groups
        q = q.reshape(num_tokens, groups, repeat, dim)
        if len(self.rows) == 1 and self.rows[0].in_order:
            out, lse = self._own_keys(self.rows[0], q, keys, values, scaling, window, softcap)
        else:
            out = torch.empty_like(q)
            lse = torch.empty(num_tokens, groups, repeat, dtype=torch.float32, device=q.device) if self.shared else None
            for rows in self.rows:
                batch, num_queries = rows.tokens.shape
                q_rows = q[rows.tokens.reshape(-1)].view(batch, num_queries, groups, repeat, dim).transpose(1, 2)
                part, part_lse = self._own_keys(rows, q_rows.reshape(batch, groups, -1, dim), keys, values, scaling, window, softcap)
                part = part.view(batch, groups, num_queries, repeat, dim).transpose(1, 2).reshape(-1, groups, repeat, dim)
                out[rows.take_tokens] = part[rows.take_rows]
                if lse is not None and part_lse is not None:
                    part_lse = part_lse.view(batch, groups, num_queries, repeat).transpose(1, 2).reshape(-1, groups, repeat)
                    lse[rows.take_tokens] = part_lse[rows.take_rows].float()
        for shared in self.shared:
            assert lse is not None
            self._join_prefix(shared, layer, q, out, lse, scaling, window, softcap)
        return out.reshape(num_tokens, num_heads, dim)

    def _own_keys(
        self,
        rows: Rows,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries q [B, G, Q * R, D] of `rows` against what lies in their slots."""
        where = rows.slots if rows.first_slot is None else slice(rows.first_slot, rows.first_slot + len(rows.tokens))
        mask = rows.mask(window, q.shape[2] // rows.tokens.shape[1], q.dtype)
        k_rows, v_rows = keys[where, :, : rows.max_length], values[where, :, : rows.max_length]
        return attention(q, k_rows, v_rows, mask, scaling, softcap, with_lse=bool(self.shared))

    def _join_prefix(
        self,
        shared: SharedRows,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Adds the prefix's part to `out` [T, G, R, D], in place: softmax over the union, by the two log-sum-exps."""
        count, (groups, repeat, dim) = len(shared.tokens), q.shape[1:]
        size = len(shared.segment.ids)
        tokens = slice(None) if shared.every else shared.tokens
        q_rows = q[tokens].transpose(0, 1).reshape(1, groups, count * repeat, dim)
        mask = None
        if window is not None:
            seen = torch.arange(size, device=q.device)[None, :] > shared.positions[:, None] - window  # [n, size]
            # A row that sees nothing of the prefix keeps one key of weight exp(-1e30): a log-sum-exp of -inf would make the join a NaN.
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -1e30)
            mask = mask.repeat_interleave(repeat, dim=0)[None, None]
        k_rows, v_rows = shared.segment.keys[layer].unsqueeze(0), shared.segment.values[layer].unsqueeze(0)
        part, part_lse = attention(q_rows, k_rows, v_rows, mask, scaling, softcap, with_lse=True)
        assert part_lse is not None
        part = part.view(groups, count, repeat, dim).transpose(0, 1)
        part_lse = part_lse.view(groups, count, repeat).transpose(0, 1).float()
        weight = torch.sigmoid(part_lse - lse[tokens]).unsqueeze(-1).to(out.dtype)  # share of the softmax mass that lies in the prefix
        joined = out[tokens].lerp_(part, weight)
        if not shared.every:
            out[tokens] = joined
