"""The changes between two versions of the weights, bit for bit.

At the learning rates of RL, most bfloat16 weights do not change from one step to the next, because
an update is smaller than their last digit. A delta has only the changed weights. `find_change`
compares bits, so `apply_change` gives the new tensor to the last bit, including NaN and -0.

    gaps[i] + 1 = index[i] - index[i - 1], index[-1] = -1     values[i]: the new element, whole

Gaps have 8 or 16 bits, whichever makes the tensor smaller. If a gap is too long, unchanged elements
in between are listed too. So indices always increase and never need 64 bits. Values are new
elements, not differences, so applying a delta twice gives the same result. Measured on SmolLM2-135M
(benchmarks/weights.py), this is smaller than int32 indices and quicker than xor with a compressor.
Nothing here proves that a delta fits its base; the checksums of weight_versions.py do.

    gaps:NAME values:NAME    of one tensor               whole:NAME    all of it, where smaller
    gaps:NAME#2 ...          of its third box, where processes have compared a box each
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from agentevo.errors import EngineError
from agentevo.models.compute.parts import Box, Grid, boxes_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorChange(NamedTuple):
    """Elements of one tensor, flattened, that have new bits."""

    indices: torch.Tensor
    """int64 [n], strictly ascending."""
    values: torch.Tensor
    """[n], of the tensor's own dtype."""


def find_change(old: torch.Tensor, new: torch.Tensor) -> TensorChange:
    """Finds the elements whose bits differ."""
    flat = new.detach().reshape(-1)
    indices = _differs(old, new).nonzero().squeeze(1)
    return TensorChange(indices, flat[indices])


def pack_change(change: TensorChange, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored form (gaps, values) of a change of at least one element. Unchanged elements that
    bridge a gap are taken from the new tensor `new`."""
    narrow = _bridge_gaps(change.indices, 1 << 8)
    wide = _bridge_gaps(change.indices, 1 << 16)
    size = new.element_size()
    is_narrow = len(narrow) * (1 + size) <= len(wide) * (2 + size)
    indices = narrow if is_narrow else wide
    gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1
    values = change.values if len(indices) == len(change.values) else new.reshape(-1)[indices]
    return gaps.to(torch.uint8 if is_narrow else torch.uint16), values


def apply_change(base: torch.Tensor, gaps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the new tensor. `base` does not change. Raises EngineError for changes that do not
    fit this tensor."""
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


def checksum(tensor: torch.Tensor, grid: Grid | None = None) -> str:
    """SHA-256 of dtype, shape and bits of a tensor on the CPU. `grid`: the SHA-256 of the boxes'
    checksums (`combine_checksums`), which is what several processes with one box each compute."""
    if grid is not None:
        boxes = boxes_of(grid, tensor.shape)
        return combine_checksums(checksum(tensor[box.slices]) for box in boxes)
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combine_checksums(checksums: Iterable[str]) -> str:
    """The checksum of a tensor from those of its boxes, in the order of `boxes_of`."""
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The size of all elements in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def change_of(base: torch.Tensor, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """The change as `gaps` and `values`, or as `whole` if that is smaller. Empty if nothing
    changed."""
    count = int(torch.count_nonzero(_differs(base, new)))  # a sum would create an int64 tensor
    if 2 * count < new.numel():
        gaps, values = pack_change(find_change(base, new), new)
        packed = {"gaps": gaps, "values": values}
        if num_bytes(packed) < num_bytes({"whole": new}):
            return packed if count else {}
    return {"whole": new} if count else {}


def delta_of(
    base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a delta's files, for whole tensors."""
    return {
        f"{kind}:{name}": packed
        for name, tensor in new.items()
        for kind, packed in change_of(base[name], tensor).items()
    }


def with_delta(
    base: Mapping[str, torch.Tensor],
    change: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Applies a delta and returns the new tensors. The tensors of `base` do not change. `grids`:
    the grids of tensors that were compared in boxes. Raises EngineError for changes that do not fit
    this base."""
    places = _places(base, grids)
    new = dict(base)
    for entry, tensor in change.items():
        kind, _, key = entry.partition(":")
        if key not in places or kind not in ("gaps", "values", "whole"):
            raise EngineError(f"an entry {entry!r}")
        if kind == "values":
            continue

        name, box = places[key]
        old = base[name] if box is None else base[name][box.slices]
        if kind == "whole":
            if tensor.dtype != old.dtype or tensor.shape != old.shape:
                raise EngineError(f"{entry} is {tensor.dtype} {tuple(tensor.shape)}")
            updated = tensor
        else:
            values = change.get(f"values:{key}")
            if values is None:
                raise EngineError(f"no values for {key}")
            updated = apply_change(old, tensor, values)

        if box is None:
            new[name] = updated
            continue

        if new[name] is base[name]:
            new[name] = base[name].clone(memory_format=torch.contiguous_format)

        new[name][box.slices] = updated

    return new


def box_keys(name: str, count: int) -> list[str]:
    """The keys of the `count` boxes of a tensor in a delta."""
    return [name] if count == 1 else [f"{name}#{number}" for number in range(count)]


def _places(
    base: Mapping[str, torch.Tensor], grids: Mapping[str, Grid]
) -> dict[str, tuple[str, Box | None]]:
    """Key of an entry -> the name of its tensor, and its box."""
    places: dict[str, tuple[str, Box | None]] = {name: (name, None) for name in base}
    for name, grid in grids.items():
        try:
            boxes = boxes_of(grid, base[name].shape)
        except (KeyError, ValueError) as error:
            raise EngineError(f"a grid of {name} that it can't have ({error})") from error
        places |= {
            key: (name, box) for key, box in zip(box_keys(name, len(boxes)), boxes, strict=True)
        }

    return places


def _differs(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Whether each element's bits differ, bool [elements]."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(f"{old.dtype} {tuple(old.shape)} against {new.dtype} {tuple(new.shape)}")
    return _bits(old.detach().reshape(-1)) != _bits(new.detach().reshape(-1))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _bridge_gaps(indices: torch.Tensor, reach: int) -> torch.Tensor:
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
