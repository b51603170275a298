"""What is asked, compared as text: held-out tasks stay out of training by it."""

from __future__ import annotations

import hashlib


def asked_key(text: str) -> bytes | None:
    """A digest (16 bytes) that two questions share which differ in white space and case alone; None
    for a text without a character."""
    plain = " ".join(text.split()).casefold()
    if not plain:
        return None
    return hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=16).digest()
