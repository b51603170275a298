"""Attention of an engine step: every new token against its own sequence's keys and values, and
against a shared prefix.

    build_batch (batch.py) -> CacheAttention, for each CacheRows (cache_rows.py): sequences of like
                              length with one prefix
    attend, per layer      -> _write: new keys and values into their slots
                           -> _attend_by_own_kernels, _attend_few_in_order, _attend_many_in_order:
                              on a CPU in float32, in order
                           -> _attend_fused: elsewhere, with PyTorch's own attention

Letters in shapes: T new tokens of the step, B sequences, Q queries of a sequence, K keys, H heads,
G key-value heads, R = H / G query heads per key-value head, D numbers of a head, P tokens of a
shared prefix.

A sequence either copies a short prefix into its slot or refers to a long one. In the second case
its queries meet the segment together with those of all other sequences that refer to it, as one
matrix product (as in Hydragen, arXiv 2402.05099).

In order, on a CPU in float32: the scores of a query are one row, prefix first. Every kernel sums
the output over the keys one after the other, in stretches of ORDERED positions that are then added
up. Keys that a query does not see add zeros. A token's numbers therefore depend only on the tokens
before it: not on the number of queries that are computed at once, on padding, or on the sequences
that share the prefix (tests/inference/test_batch_invariance.py).

    own kernels   (`models/compute/cpu_kernels.py`) for any number of queries, with or without a
                  prefix. Not if scores are capped, or if a head's size is not a multiple of a
                  vector's.
    few queries   Matrix products, one per sequence and head, would be smaller than their overhead.
                  Scores are sums of key rows weighted by the query, and outputs are sums of value
                  rows weighted by attention. One call computes all of them.
    many          Matrix products, one sequence and key-value head after the other.

Elsewhere the log-sum-exp joins the two parts of the softmax (cascade attention), and the last
digits do depend on the other sequences of the step.

An attention sink is one more score of each row: in order its first one, elsewhere another part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from agentevo.inference.embedded.cache_rows import NEG_INF, CacheRows
from agentevo.inference.embedded.kv_cache import KEY_BLOCK, KVCache, in_rows, num_blocks
from agentevo.models.compute.cpu_kernels import WHOLE, CpuKernels, KernelCache, Prefix, cpu_kernels
from agentevo.models.compute.linear import ORDERED, available, product, weighted_sums
from agentevo.models.compute.routers import Routing
from agentevo.models.compute.windows import Window

BLOCK_SCORES = 512 * 1024
"""The number of scores that are computed at once, so that they fit into the processor's cache."""
FEWEST_KEYS = 32
"""PyTorch uses another softmax, which sums in another order, for rows that are shorter than a
vector register."""
MASKED_SCORE = -1e30
"""The score of a masked key of a prefix if all keys of a row may be masked: with -inf, the
log-sum-exp would be -inf, and the join NaN."""


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

    Queries q [B, G, Q, D], k and v [B, G, K, D], mask [B, 1, Q, K] additive or None -> out
    [B, G, Q, D], lse [B, G, Q]. Every row must see a key.
    """
    if q.device.type == "cpu" and softcap is None and q.dtype == k.dtype:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scaling
        )

    if softcap is None and not with_lse and q.dtype.itemsize < torch.float32.itemsize:
        return scaled_dot_product_attention(q, k, v, mask, scale=scaling), None

    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scaling)
    scores = _mask_scores(scores, mask, softcap)
    largest = scores.amax(dim=-1) if with_lse else None
    weights = _softmax(scores)
    lse = None if largest is None else largest - weights.amax(dim=-1).log()
    return torch.matmul(weights, v.float()).to(v.dtype), lse


def _mask_scores(
    scores: torch.Tensor, mask: torch.Tensor | None, cap: float | None
) -> torch.Tensor:
    """Scores [..., Q, K] with their cap and mask, in place."""
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention weights of scores [..., Q, K], which may be overwritten; float32. `sinks`, of a
    shape that expands to [..., Q], are further scores without a weight."""
    if sinks is not None:
        beside = sinks.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
        return _softmax(torch.cat([beside, scores], dim=-1))[..., 1:].contiguous()

    num_keys = scores.shape[-1]
    kernels = cpu_kernels()
    if kernels is not None and scores.device.type == "cpu" and scores.dtype == torch.float32:
        return kernels.softmax_(scores.contiguous())

    if num_keys < FEWEST_KEYS:
        padded = torch.nn.functional.pad(scores, (0, FEWEST_KEYS - num_keys), value=NEG_INF)
        return torch.softmax(padded, dim=-1)[..., :num_keys].contiguous()

    return torch.softmax(scores, dim=-1)


class CacheAttention:
    """The plan of one engine step: writes the new keys and values, then computes the attention of
    every new token over its own sequence."""

    def __init__(
        self, cache: KVCache, slots: torch.Tensor, places: torch.Tensor, rows: list[CacheRows]
    ) -> None:
        self.cache = cache
        self.slots = slots  # [T]: the slot of each token
        self.places = places  # [T]: its position there
        self.blocks = places // KEY_BLOCK
        self.offsets = places % KEY_BLOCK
        self.rows = rows
        self.routing: Routing | None = None
        """Records the chosen experts (models/compute/routers.py)."""
        self._calls = 0

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
        """See AttentionPlan.attend: q [T, H, D] -> [T, H, D]."""
        # 1. The new tokens' keys and values join their sequences in the cache. The calls of a pass
        # are told apart by their order, because a layer may attend several times.
        layer = self._calls
        self._calls += 1
        num_tokens, num_heads, dim = q.shape
        groups = k.shape[1]
        repeat = num_heads // groups
        in_order = available() and q.device.type == "cpu" and q.dtype == torch.float32
        keys, values = self.cache.layer(layer, k, scratch=repeat if in_order else 0)
        own_kernels = _own_kernels(keys, values, softcap) if in_order else None
        if sinks is not None:
            sinks = sinks.detach().view(groups, repeat)
        view = _Layer(layer, keys, values, scaling, window, softcap, sinks, own_kernels)

        if own_kernels is None:
            self._write(keys, values, k, v)
        else:
            own_kernels[0].keep(own_kernels[1], k, v, self.slots, self.places)
            q = q.contiguous()  # some models lay out their heads one after the other

        q = q.reshape(num_tokens, groups, repeat, dim)
        # 2. Every token attends to its own sequence. Without prompts in the step, no queries are
        # gathered.
        attended = _attend_few_in_order if in_order else _attend_fused
        straight = own_kernels is None and len(self.rows) == 1 and self.rows[0].is_one_query_each
        if straight and (not in_order or self.rows[0].uses_weighted_sums(repeat)):
            return attended(self.rows[0], q, view).reshape(num_tokens, num_heads, dim)

        out = torch.empty_like(q)
        for rows in self.rows:
            num_queries = rows.tokens.shape[1]
            if own_kernels is not None:
                _attend_by_own_kernels(rows, q, view, out)
                continue

            if in_order and not rows.uses_weighted_sums(repeat):
                _attend_many_in_order(rows, q, view, out)
                continue

            # Queries by key-value head, padded to Q per sequence: [B, G, Q * R, D].
            batch = len(rows.tokens)
            q_rows = q[rows.tokens.reshape(-1)].view(batch, num_queries, groups, repeat, dim)
            q_rows = q_rows.transpose(1, 2).reshape(batch, groups, -1, dim)
            part = attended(rows, q_rows, view)
            # Back to one row per token, without the padding.
            part = part.view(batch, groups, num_queries, repeat, dim).transpose(1, 2)
            out[rows.take_tokens] = part.reshape(-1, groups, repeat, dim)[rows.take_rows]

        return out.view(num_tokens, num_heads, dim)

    def _write(
        self, keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Writes the new keys and values [T, Hkv, D] into their slots."""
        rows = self.rows[0]
        if rows.has_equal_lengths and rows.first_slot is not None:
            where = slice(rows.first_slot, rows.first_slot + len(k))
            place = rows.max_length - 1
            keys[where, :, place // KEY_BLOCK, :, place % KEY_BLOCK] = k
            values[where, :, place] = v
        else:
            keys[self.slots, :, self.blocks, :, self.offsets] = k
            values[self.slots, :, self.places] = v


class _Layer(NamedTuple):
    """The inputs of a layer's attention, without the queries."""

    call: int
    keys: torch.Tensor
    """[slots, G, blocks, D, KEY_BLOCK]"""
    values: torch.Tensor
    """[slots, G, capacity + scratch, D]"""
    scaling: float
    """The factor of the scores."""
    window: Window
    softcap: float | None
    sinks: torch.Tensor | None
    """[G, R]"""
    own_kernels: tuple[CpuKernels, KernelCache] | None
    """AgentEvo's own kernels; None if they do not support this layer."""

    def sinks_of(self, num: int) -> torch.Tensor | None:
        """[G, num]: the sinks of the queries of each key-value head, a multiple of R."""
        if self.sinks is None:
            return None
        return self.sinks.repeat(1, num // self.sinks.shape[1])


def _own_kernels(
    keys: torch.Tensor, values: torch.Tensor, softcap: float | None
) -> tuple[CpuKernels, KernelCache] | None:
    kernels = cpu_kernels()
    if kernels is None or softcap is not None or values.shape[-1] % WHOLE:
        return None
    return kernels, KernelCache.of(keys, values)


def _attend_by_own_kernels(
    rows: CacheRows, q: torch.Tensor, layer: _Layer, out: torch.Tensor
) -> None:
    """Attention by our own kernels, in order: q [T, G, R, D] of the whole step, into `out` of the
    same shape."""
    assert layer.own_kernels is not None

    kernels, cache = layer.own_kernels
    prefix = None
    if rows.segment is not None:
        prefix = Prefix.of(rows.segment.keys[layer.call], rows.segment.values[layer.call])

    kernels.attend(
        cache,
        q.flatten(1, 2),
        tokens=rows.tokens,
        slots=rows.slots,
        lengths=rows.lengths,
        counts=rows.queries,
        prefix=prefix,
        scaling=layer.scaling,
        window=layer.window,
        sinks=None if layer.sinks is None else layer.sinks.float().contiguous(),
        out=out.flatten(1, 2),
    )


def _attend_few_in_order(rows: CacheRows, q: torch.Tensor, layer: _Layer) -> torch.Tensor:
    """Attention of few queries per sequence and head, q [B, G, N, D] with N = Q * R, in order.
    Scores are sums of key rows weighted by the query's numbers, and outputs are sums of value rows
    weighted by attention. For a prefix, both are matrix products for all queries of a key-value
    head together. The prefix's part of the output is the first row of the sum, with weight 1."""
    batch, groups, num, dim = q.shape
    length = rows.max_length
    prefix = rows.prefix
    keys = layer.keys
    values = layer.values
    places = values.shape[2]
    q = q * layer.scaling
    tables = rows.table_rows(groups, num, dim, keys.shape[2], places)
    per_block = q.unsqueeze(3).expand(-1, -1, -1, num_blocks(length), -1)
    scores = weighted_sums(keys.view(-1, KEY_BLOCK), tables.keys, tables.key_starts, per_block)
    scores = scores.view(batch, groups, num, -1)[..., :length]
    if rows.segment is not None:
        of_prefix = q.new_empty(groups, batch, num, prefix)
        for head, k in enumerate(rows.segment.keys_of(layer.call)):
            of_prefix[head] = _product(q[:, head].reshape(-1, dim), k).view(batch, num, prefix)
        scores = torch.cat([of_prefix.transpose(0, 1), scores], dim=-1)

    mask = rows.mask(layer.window, num // rows.tokens.shape[1], q.dtype)
    weights = _softmax(_mask_scores(scores, mask, layer.softcap), layer.sinks_of(num))
    prefix_sums = None  # sums over the prefix's complete stretches
    if rows.segment is not None:
        ends = prefix // ORDERED * ORDERED
        prefix_sums = q.new_zeros(q.shape) if ends else None
        for head, v in enumerate(rows.segment.values[layer.call]):
            of_head = weights[:, head, :, :prefix].reshape(-1, prefix)
            rest = _product(of_head[:, ends:], v[ends:].t()) if ends < prefix else q.new_zeros(())
            values[rows.slot_index, head, places - num :] = rest.expand(batch * num, dim).view(
                batch, num, dim
            )
            if prefix_sums is not None:
                prefix_sums[:, head] = _multiply_in_order(of_head[:, :ends], v[:ends]).view(
                    batch, num, dim
                )

        weights = torch.nn.functional.pad(weights[..., prefix:], (1, 0), value=1.0)

    sums = weighted_sums(values.view(-1, dim), tables.values, tables.value_starts, weights)
    stretches = sums.view(*q.shape[:3], -1, dim).unbind(3)
    out = stretches[0] if prefix_sums is None else prefix_sums + stretches[0]
    for stretch in stretches[1:]:
        out = out + stretch

    return out


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for x [rows, in] and weight [out, in]. Every row of x is summed in the same
    order, also if it is the only one."""
    return product(x.expand(2, -1), weight)[:1] if x.shape[0] == 1 else product(x, weight)


def _multiply_in_order(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [N, K] @ values [K, D], summed in stretches of ORDERED that are then added up."""
    out = _product(weights[:, :ORDERED], values[:ORDERED].t())
    for start in range(ORDERED, len(values), ORDERED):
        stretch = slice(start, start + ORDERED)
        out = out + _product(weights[:, stretch], values[stretch].t())
    return out


def _attend_many_in_order(
    rows: CacheRows, q: torch.Tensor, layer: _Layer, out: torch.Tensor
) -> None:
    """Attention of many queries per sequence, in order: q [T, G, R, D] of the whole step, into
    `out` of the same shape. Each matrix product covers one key-value head of a stretch, and as many
    queries as keep the scores in the processor's cache."""
    _, groups, repeat, dim = q.shape
    for index, (start, count, slot, length) in enumerate(rows.new_tokens):
        k = in_rows(layer.keys[slot, :, : num_blocks(length)])[:, :length]
        v = layer.values[slot, :, :length]
        if rows.segment is not None:
            k = torch.cat([rows.segment.keys_of(layer.call), k], dim=1)
            v = torch.cat([rows.segment.values[layer.call], v], dim=1)

        mask = rows.mask_of_new_tokens(index, layer.window)
        step = max(16, BLOCK_SCORES // k.shape[1] // repeat // groups)
        for first in range(0, count, step):
            last = min(first + step, count)
            num_visible = k.shape[1] - count + last  # keys that the last query sees
            span = slice(start + first, start + last)
            scaled = q[span] * layer.scaling
            blocks = scaled.transpose(0, 1).reshape(groups, -1, dim)  # [G, N, D]
            by_head = zip(blocks.unbind(), k[:, :num_visible].unbind(), strict=True)
            scores = torch.cat([_product(*of_head) for of_head in by_head])
            scores = scores.view(groups, -1, repeat, num_visible)
            weights = _softmax(
                _mask_scores(scores, mask[first:last, None, :num_visible], layer.softcap),
                None if layer.sinks is None else layer.sinks.unsqueeze(1),
            )
            weights = weights.view(groups, -1, num_visible)
            by_head = zip(weights.unbind(), v[:, :num_visible].unbind(), strict=True)
            parts = torch.cat([_multiply_in_order(*of_head) for of_head in by_head])
            out[span] = parts.view(groups, -1, repeat, dim).transpose(0, 1)


def _attend_fused(rows: CacheRows, q: torch.Tensor, layer: _Layer) -> torch.Tensor:
    """Attention of queries q [B, G, N, D] by PyTorch's kernels. With output o and
    log-sum-exp l of the own keys, p and m of the prefix, the softmax over the union gives

        (e^l o + e^m p) / (e^l + e^m) = o + sigmoid(m - l) (p - o)

    A sink s scales the output of all keys by sigmoid(l - s).
    """
    length = rows.max_length
    prefix = rows.prefix
    where = rows.slot_index
    mask = rows.mask(layer.window, q.shape[2] // rows.tokens.shape[1], q.dtype)
    k = in_rows(layer.keys[where, :, : num_blocks(length)])[:, :, :length]
    v = layer.values[where, :, :length]
    own_mask = None if mask is None else mask[..., prefix:]
    scaling = layer.scaling
    softcap = layer.softcap
    sinks = layer.sinks_of(q.shape[2])
    with_lse = rows.segment is not None or sinks is not None
    out, lse = attention(q, k, v, own_mask, scaling, softcap, with_lse)
    if rows.segment is None:
        return out if sinks is None else _scale_beside(out, lse, sinks)

    # All queries of a key-value head are rows of one matrix product.
    by_head = q.transpose(0, 1).flatten(1, 2)[None]  # [1, G, B * N, D]
    k = rows.segment.keys_of(layer.call)[None]
    v = rows.segment.values[layer.call][None]

    beyond = None
    if mask is not None and layer.window is not None:
        beyond = mask[..., :prefix].clamp_min(MASKED_SCORE).reshape(1, 1, -1, prefix)

    part, of_part = attention(by_head, k, v, beyond, scaling, softcap, with_lse=True)
    assert lse is not None and of_part is not None

    batch, groups, num, dim = q.shape
    part = part.view(groups, batch, num, dim).transpose(0, 1)
    of_part = of_part.view(groups, batch, num).transpose(0, 1)
    # The prefix's share of the softmax mass.
    weight = torch.sigmoid(of_part.float() - lse.float()).unsqueeze(-1).to(out.dtype)
    out = out.lerp(part, weight)
    if sinks is None:
        return out
    return _scale_beside(out, torch.logaddexp(lse.float(), of_part.float()), sinks)


def _scale_beside(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor) -> torch.Tensor:
    """The output [B, G, N, D] over keys with the log-sum-exp [B, G, N], beside sinks [G, N]."""
    assert lse is not None
    return (out * torch.sigmoid(lse.float() - sinks).unsqueeze(-1)).to(out.dtype)
