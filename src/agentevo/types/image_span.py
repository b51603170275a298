"""Where an image is in a sequence of tokens."""

from __future__ import annotations

import msgspec


class ImageSpan(msgspec.Struct, frozen=True):
    """The tokens of one image in a sequence. A span is never cut."""

    offset: int
    """The place of its first feature token."""
    length: int
    """The number of tokens up to and including its last feature token. Families that show an image
    as tiles have other tokens between the tiles."""
    grid: tuple[int, ...]
    """(t, h, w) patches for families with M-RoPE, otherwise (number of feature tokens,)."""
    digest: str
    """The SHA-256 of the image file, in hexadecimal."""
