"""Key-value memory of the embedded engine.

Layout, per layer (more exactly, per call of attention in a pass): keys [slots, Hkv, capacity /
KEY_BLOCK, D, KEY_BLOCK], values [slots, Hkv, capacity + scratch, D]. A sequence owns one slot.
Attention uses the few scratch rows behind each head's values. In a block of keys the positions are
adjacent; in values the numbers of a head are adjacent. Both are therefore tables whose rows
attention sums (`cache_attention.py`). Shared prefixes (`PrefixSegment`), and idle sessions whose
slot another sequence needed (`KeysAndValues`), are stored outside of the slots.

Invariant: a sequence's visible keys are segment[0:offset] + slot[0:length], in the order of
positions; `offset` is 0 without a reference. Memory: slots x capacity + places outside of them <=
the budget, whole blocks; `resize` compacts, so slots in use are always movable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from agentevo.inference.embedded.routing import TokenRows
from agentevo.inference.embedded.states import state_support
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.trial import key_value_sizes

KEY_BLOCK = 32
"""The number of positions in a block of keys. Slots hold whole blocks."""


def num_blocks(tokens: int) -> int:
    """The number of blocks that hold `tokens` tokens."""
    return -(-tokens // KEY_BLOCK)


def in_rows(keys: torch.Tensor) -> torch.Tensor:
    """Copies blocks of keys [..., blocks, D, KEY_BLOCK] into rows, one per key [..., blocks *
    KEY_BLOCK, D]."""
    return keys.transpose(-1, -2).flatten(-3, -2).contiguous()


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Key-value memory of one token over all layers of a prepared model, in bytes. Of a model that
    computes rows: that of one token of a long sequence."""
    if row_settings(model) is not None:
        return round(state_support(model).unit_bytes)
    numbers = sum(heads * (key + value) for heads, key, value in key_value_sizes(model))
    return numbers * next(model.parameters()).element_size()


class KeysAndValues(NamedTuple):
    """Keys and values of consecutive tokens, outside of the slots."""

    keys: list[torch.Tensor]
    """One tensor per layer, [Hkv, blocks, D, KEY_BLOCK]."""
    values: list[torch.Tensor]
    """One tensor per layer, [Hkv, tokens, D]."""


@dataclass(eq=False)
class PrefixSegment:
    """Keys and values of a prefix that several sequences share, computed once."""

    ids: list[int]
    keys: list[torch.Tensor]
    """One tensor per layer, [Hkv, blocks, D, KEY_BLOCK]."""
    values: list[torch.Tensor]
    """One tensor per layer, [Hkv, len(ids), D]."""
    version: int | None = None
    """The weights that computed it: EngineRequest.version."""
    users: int = 0
    """The number of live sequences that refer to it. At 0 the segment may be dropped."""
    last_used: int = 0
    routed: TokenRows = field(default_factory=TokenRows)
    """The routed experts of its tokens, if the engine records them."""

    def keys_of(self, layer: int) -> torch.Tensor:
        """A copy of a layer's keys as rows [Hkv, len(ids), D]."""
        return in_rows(self.keys[layer])[:, : len(self.ids)]


class KVCache:
    """The buffers of the slots. A layer's buffers are created in the first forward pass."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.num_slots = 0
        self.capacity = 0

    def layer(
        self, index: int, like: torch.Tensor, scratch: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of one layer. New buffers get their shape, dtype and device from `like` [T,
        Hkv, D], and `scratch` scratch rows."""
        while len(self.keys) <= index:
            groups, dim = like.shape[1:]
            self.keys.append(
                like.new_zeros(self.num_slots, groups, self.capacity // KEY_BLOCK, dim, KEY_BLOCK)
            )
            self.values.append(like.new_zeros(self.num_slots, groups, self.capacity + scratch, dim))
        return self.keys[index], self.values[index]

    def resize(self, num_slots: int, capacity: int, used: list[tuple[int, int]]) -> dict[int, int]:
        """Creates new buffers and copies the `used` slots, given as (slot, length). Returns old
        slot -> new slot (0, 1, ... in this order). `capacity` is a multiple of KEY_BLOCK."""
        for layer, (old_keys, old_values) in enumerate(zip(self.keys, self.values, strict=True)):
            _, groups, places, dim = old_values.shape
            scratch = places - self.capacity

            keys = old_keys.new_zeros(num_slots, groups, capacity // KEY_BLOCK, dim, KEY_BLOCK)
            values = old_values.new_zeros(num_slots, groups, capacity + scratch, dim)
            for target, (slot, length) in enumerate(used):
                blocks = num_blocks(length)
                keys[target, :, :blocks] = old_keys[slot, :, :blocks]
                values[target, :, :length] = old_values[slot, :, :length]

            self.keys[layer] = keys
            self.values[layer] = values

        self.num_slots = num_slots
        self.capacity = capacity
        return {slot: target for target, (slot, _) in enumerate(used)}

    def cut(self, slot: int, length: int) -> KeysAndValues:
        """A copy of the slot's first `length` keys and values."""
        return KeysAndValues(
            [k[slot, :, : num_blocks(length)].clone() for k in self.keys],
            [v[slot, :, :length].clone() for v in self.values],
        )

    def paste(self, slot: int, saved: KeysAndValues, length: int) -> None:
        """Copies the first `length` keys and values to the start of the slot."""
        blocks = num_blocks(length)
        for layer, (k, v) in enumerate(zip(*saved, strict=True)):
            self.keys[layer][slot, :, :blocks] = k[:, :blocks]
            self.values[layer][slot, :, :length] = v[:, :length]
