"""What changed between two versions of the weights, bit for bit.

At the learning rates of RL most bfloat16 weights keep their bits from one step to the next, since
an update is smaller than their last digit. A delta holds the others: `changed` compares bits, not
numbers, so that `applied(base, delta)` is the new tensor to the last bit, NaN and -0 included.

    gaps[i] + 1 = index[i] - index[i - 1], index[-1] = -1     values[i]: the new element, whole

Gaps are of 8 or 16 bits, whichever makes the tensor smaller; where one is too long, elements in
between that did not change are listed too. Indices therefore only grow and never need 64 bits.
Values are new elements and not differences: what is applied twice is the same. Measured on
SmolLM2-135M (benchmarks/weights.py), that is smaller than int32 indices and quicker than xor with a
compressor. Nothing here says that a delta fits its base; the checksums of weight_versions.py do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from agentevo.errors import EngineError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """Elements of one tensor, flattened, that have new bits."""

    indices: torch.Tensor
    """int64 [n], strictly ascending, in the whole tensor."""
    values: torch.Tensor
    """[n], of the tensor's own dtype."""


def changed(old: torch.Tensor, new: torch.Tensor, *, offset: int = 0) -> Change:
    """What differs in its bits. Both are the same stretch of a tensor: a shard that begins at
    element `offset` of the flattened whole. Shards' changes, one after the other, are the whole
    tensor's (`joined`)."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(f"{old.dtype} {tuple(old.shape)} against {new.dtype} {tuple(new.shape)}")
    flat = new.detach().reshape(-1)
    differs = _bits(old.detach().reshape(-1)) != _bits(flat)
    indices = differs.nonzero().squeeze(1)
    return Change(indices + offset, flat[indices])


def joined(shards: list[Change]) -> Change:
    """The change of a tensor from those of its shards, in the order of their offsets."""
    return Change(
        torch.cat([shard.indices for shard in shards]),
        torch.cat([shard.values for shard in shards]),
    )


def packed(change: Change, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gaps, values) as they are stored, of at least one element. `whole` is the new tensor: what
    is listed only to bridge a gap is taken from it."""
    narrow = _bridged(change.indices, 1 << 8)
    wide = _bridged(change.indices, 1 << 16)
    size = whole.element_size()
    is_narrow = len(narrow) * (1 + size) <= len(wide) * (2 + size)
    indices = narrow if is_narrow else wide
    gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1
    values = change.values if len(indices) == len(change.values) else whole.reshape(-1)[indices]
    return gaps.to(torch.uint8 if is_narrow else torch.uint16), values


def applied(base: torch.Tensor, gaps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A new tensor; `base` stays as it is. Raises EngineError for what can't be of this tensor."""
    if gaps.dtype not in (torch.uint8, torch.uint16) or gaps.ndim != 1:
        raise EngineError(f"gaps of dtype {gaps.dtype} and shape {tuple(gaps.shape)}")
    if values.dtype != base.dtype or values.shape != gaps.shape:
        raise EngineError(
            f"values of dtype {values.dtype} and shape {tuple(values.shape)} for {len(gaps)} "
            f"elements of {base.dtype}"
        )
    indices = (gaps.to(torch.int64) + 1).cumsum(0) - 1
    if len(indices) and int(indices[-1]) >= base.numel():
        raise EngineError(f"element {int(indices[-1])} of a tensor of {base.numel()}")
    new = base.detach().clone(memory_format=torch.contiguous_format)
    new.view(-1)[indices] = values
    return new


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bits of a tensor on the CPU."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def delta_of(
    base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a delta's files have: gaps and values of each tensor that changed, or all of it where
    that is smaller."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in new.items():
        change = changed(base[name], tensor)
        if not len(change.indices):
            continue
        if 2 * len(change.indices) < tensor.numel():
            gaps, values = packed(change, tensor)
            if num_bytes({"gaps": gaps, "values": values}) < num_bytes({"whole": tensor}):
                found |= {f"gaps:{name}": gaps, f"values:{name}": values}
                continue
        found[f"whole:{name}"] = tensor
    return found


def with_delta(
    base: Mapping[str, torch.Tensor], change: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The inverse of `delta_of`. Raises EngineError for what can't be of this base."""
    new = dict(base)
    for key, tensor in change.items():
        kind, _, name = key.partition(":")
        if name not in base or kind not in ("gaps", "values", "whole"):
            raise EngineError(f"an entry {key!r}")
        if kind == "gaps":
            values = change.get(f"values:{name}")
            if values is None:
                raise EngineError(f"no values for {name}")
            new[name] = applied(base[name], tensor, values)
        elif kind == "whole":
            new[name] = tensor
    return new


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _bridged(indices: torch.Tensor, reach: int) -> torch.Tensor:
    """`indices` with elements added so that no step is longer than `reach`."""
    steps = torch.diff(indices, prepend=indices.new_tensor([-1]))
    extra = (steps - 1).div(reach, rounding_mode="floor")
    total = int(extra.sum())
    if not total:
        return indices
    starts = (indices - steps).repeat_interleave(extra)
    first = (extra.cumsum(0) - extra).repeat_interleave(extra)
    number = torch.arange(1, total + 1, dtype=torch.int64) - first
    return torch.cat([indices, starts + number * reach]).sort().values
