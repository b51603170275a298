"""Sequences that an engine step computes together, with the masks and tables of their attention.
All layers of the step share them.

Letters in shapes: B sequences, Q queries of a sequence, K keys, G key-value heads, D numbers of a
head, P tokens of a shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from agentevo.inference.embedded.kv_cache import PrefixSegment, num_blocks
from agentevo.models.compute.linear import ORDERED
from agentevo.models.compute.windows import Window, first_seen, narrow

NEG_INF = float("-inf")
FEW_QUERIES = 16
"""For at most this many queries of a sequence and key-value head, weighted sums are faster than
matrix products on a CPU (`benchmarks/passes.py`)."""
FEW_SCORES = 8192
"""Weighted sums are also faster for more queries over few keys: at most this many scores of a
sequence and key-value head."""


class TableRows(NamedTuple):
    """The rows of the key and value buffers that each query sums, as flat lists of row numbers with
    their starts, int32. The buffers are seen as tables [slots * Hkv * blocks * D, KEY_BLOCK] and
    [slots * Hkv * (capacity + scratch), D]."""

    keys: torch.Tensor
    key_starts: torch.Tensor
    values: torch.Tensor
    value_starts: torch.Tensor


def _flat(lists: torch.Tensor) -> torch.Tensor:
    """The lists concatenated, in the form that embedding_bag takes."""
    return lists.to(torch.int32).view(-1)


def _starts(lists: torch.Tensor) -> torch.Tensor:
    """Where each row of `lists` [n, size] starts in the flattened tensor."""
    return torch.arange(0, lists.numel(), lists.shape[1], dtype=torch.int32)


class NewTokens(NamedTuple):
    """The new tokens of one sequence in a step."""

    start: int
    """Its first position in the step's token row."""
    num_tokens: int
    slot: int
    length: int
    """The number of keys in the slot after this step."""


@dataclass(eq=False)
class CacheRows:
    """Sequences that a step computes together: the same number of query tokens each, after padding,
    and the same prefix.

    `tokens` [B, Q] are positions in the step's flat token row; padding repeats a real one.
    `lengths` [B] is the number of keys in the slot after this step. `queries` [B] is the number of
    real tokens among the Q; 0 for an idle slot.
    """

    new_tokens: list[NewTokens]
    segment: PrefixSegment | None
    slots: torch.Tensor
    """[B]. Idle slots may be between used ones."""
    tokens: torch.Tensor
    queries: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    first_slot: int | None
    """If set, the slots are first_slot .. first_slot + B - 1, so the buffers are viewed instead of
    copied."""
    take_rows: torch.Tensor
    """[n] flat indices b * Q + i of the real queries, in the order of `take_tokens`."""
    take_tokens: torch.Tensor
    """[n] the positions of these queries in the step's token row."""
    is_one_query_each: bool
    """One query per sequence, and exactly the step's tokens in their order, so no gathering or
    scattering is needed."""
    has_equal_lengths: bool
    """`is_one_query_each`, in adjacent slots, and all of the same length, as in a group that
    started together."""
    _masks: dict[tuple[Window, int], torch.Tensor] = field(default_factory=dict)
    _masks_of_new_tokens: dict[tuple[Window, int], torch.Tensor] = field(default_factory=dict)
    _tables: dict[tuple[int, ...], TableRows] = field(default_factory=dict)

    @property
    def prefix(self) -> int:
        """P, the number of tokens of the segment; 0 without a segment."""
        return 0 if self.segment is None else len(self.segment.ids)

    def uses_weighted_sums(self, repeat: int) -> bool:
        """Whether weighted sums are used when there are `repeat` queries per token and key-value
        head."""
        num = self.tokens.shape[1] * repeat
        if self.segment is not None:
            return num <= repeat  # the capacity of the scratch rows
        return num <= FEW_QUERIES or num * self.max_length <= FEW_SCORES

    @property
    def slot_index(self) -> slice | torch.Tensor:
        """The slots as an index into the buffers."""
        first = self.first_slot
        return self.slots if first is None else slice(first, first + len(self.tokens))

    def mask(self, window: Window, repeat: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, Q * repeat, P + K]: causal, and limited to the window. None if every
        query sees every key. Cached for all layers with the same arguments."""
        prefix = self.prefix
        num_queries = self.tokens.shape[1]
        if self.has_equal_lengths and narrow(window, prefix + self.max_length - 1) is None:
            return None

        if (window, repeat) not in self._masks:
            key = torch.arange(prefix + self.max_length, device=self.lengths.device)  # [P + K]
            query = (
                self.lengths[:, None]
                - self.queries[:, None]
                + torch.arange(num_queries, device=key.device)
            )  # [B, Q]
            query = torch.minimum(query, self.lengths[:, None] - 1).clamp_min(0) + prefix
            mask = _additive(key, query, window, dtype)
            self._masks[window, repeat] = mask.repeat_interleave(repeat, dim=1).unsqueeze(1)

        return self._masks[window, repeat]

    def mask_of_new_tokens(self, index: int, window: Window) -> torch.Tensor:
        """The additive mask [num_tokens, P + length] of one sequence's new tokens. Cached for all
        layers."""
        if (window, index) not in self._masks_of_new_tokens:
            new_tokens = self.new_tokens[index]
            end = self.prefix + new_tokens.length
            key = torch.arange(end)
            query = torch.arange(end - new_tokens.num_tokens, end)
            self._masks_of_new_tokens[window, index] = _additive(key, query, window, torch.float32)
        return self._masks_of_new_tokens[window, index]

    def table_rows(
        self, groups: int, num_queries: int, dim: int, blocks_each: int, places: int
    ) -> TableRows:
        """The rows that each of `num_queries` queries per key-value head sums: D rows of every key
        block of its head (one per number of the query), then one row per value. If there is a
        prefix, the first value row is its part, at the end of the head's `places`. Cached for all
        layers with the same heads."""
        shape = (groups, num_queries, dim, blocks_each, places)
        if shape not in self._tables:
            # The index of a query's key-value head among the heads of all slots.
            heads = (self.slots[:, None] * groups + torch.arange(groups)).view(-1)  # [B * G]
            heads = heads.repeat_interleave(num_queries)  # [B * G * Q]
            # Keys are stored in blocks [D, KEY_BLOCK]: D consecutive rows per block.
            blocks = heads[:, None] * blocks_each + torch.arange(num_blocks(self.max_length))
            in_keys = blocks.view(-1, 1) * dim + torch.arange(dim)

            # Values are stored one after the other, `places` rows per head.
            in_values = heads[:, None] * places + torch.arange(self.max_length)
            # A sum ends wherever a stretch of ORDERED positions does.
            ends = torch.tensor(
                range(ORDERED - self.prefix % ORDERED, self.max_length, ORDERED), dtype=torch.int64
            )
            if self.segment is not None:
                query_index = torch.arange(num_queries).repeat(len(heads) // num_queries)
                scratch = (heads + 1) * places - num_queries + query_index
                in_values = torch.cat([scratch[:, None], in_values], dim=1)
                ends = ends + 1

            first = torch.arange(0, in_values.numel(), in_values.shape[1])
            starts = torch.cat([first[:, None], first[:, None] + ends], dim=1)
            self._tables[shape] = TableRows(
                _flat(in_keys), _starts(in_keys), _flat(in_values), _flat(starts)
            )

        return self._tables[shape]


def _additive(
    key: torch.Tensor, query: torch.Tensor, window: Window, dtype: torch.dtype
) -> torch.Tensor:
    """The additive mask [..., Q, K]: 0 if the query at position `query` [..., Q] sees the key at
    position `key` [K], its own included, otherwise -inf."""
    is_visible = key <= query[..., None]
    if window is not None:
        is_visible &= key >= first_seen(query[..., None], window)
    return torch.zeros(is_visible.shape, dtype=dtype, device=key.device).masked_fill_(
        ~is_visible, NEG_INF
    )
