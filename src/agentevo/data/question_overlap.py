"""Compares questions as text, to keep held-out tasks out of training."""

from __future__ import annotations

import hashlib


def question_key(text: str) -> bytes | None:
    """A digest (16 bytes) of a question that ignores white space and case. None for a text without
    a character."""
    plain = " ".join(text.split()).casefold()
    if not plain:
        return None
    return hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=16).digest()
