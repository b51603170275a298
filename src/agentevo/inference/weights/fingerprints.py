"""A tensor's fingerprint: 128 bits that are computed from its bits and their positions, the same on
every device.

The fingerprint is a sum over the tensor's 64-bit words x(c, i), the i-th of chunk c (its bytes,
with zeros up to a multiple of eight): the sum of x(c, i) * f(i) * g(c) modulo 2**64, twice, with
different factors. The factors are odd numbers made by SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). An odd factor has an inverse, so a change of one
word is always found. It is not a cryptographic checksum: an attacker who can choose bits can find
others with the same fingerprint.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from agentevo.models.compute.parts import as_bytes
from agentevo.runtime.devices import wraps_around

CHUNK = 2**17
"""The number of words that are summed at once."""
_MASK = 2**64 - 1


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> str:
    """The fingerprint in 32 hexadecimal digits. It does not depend on shape and dtype. It is
    computed on the tensor's device, which may be a CUDA device."""
    where = tensor if wraps_around(tensor.device.type) else tensor.cpu()
    bits = as_bytes(where.detach().contiguous())
    factors = _factors(bits.device)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for number, begin in enumerate(range(0, len(bits), 8 * CHUNK)):
        words = _words(bits[begin : begin + 8 * CHUNK])
        for which in (0, 1):
            of_chunk = (words * factors[which, : len(words)]).sum()
            sums[which] += of_chunk * _as_signed(_odd(2 * number + which + 2**40))

    first, second = (int(total) & _MASK for total in sums.tolist())
    return f"{first:016x}{second:016x}"


def _words(bits: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as int64, padded with zeros at the end. A view if possible."""
    padded_size = math.ceil(len(bits) / 8) * 8
    if padded_size != len(bits) or bits.storage_offset() % 8 or bits.data_ptr() % 8:
        padded = torch.zeros(padded_size, dtype=torch.uint8, device=bits.device)
        padded[: len(bits)] = bits
        bits = padded
    return bits.view(torch.int64)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """[2, CHUNK]"""
    factors = [[_as_signed(_odd(2 * place + which)) for place in range(CHUNK)] for which in (0, 1)]
    return torch.tensor(factors, dtype=torch.int64, device=device)


def _odd(number: int) -> int:
    """SplitMix64 of the number, with the lowest bit set."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) | 1


def _as_signed(number: int) -> int:
    """The int64 with the same bits. Its products and sums wrap around like those of unsigned
    numbers."""
    return number - 2**64 if number >= 2**63 else number
