"""Every random choice of a run is derived from (run seed, purpose, number). A seed is always an
argument, never ambient state."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts. Equal parts give equal seeds on any machine, and different
    parts give unrelated seeds."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
