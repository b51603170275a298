"""Where an image is in a sequence of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec
import numpy as np

_DIGEST = re.compile("[0-9a-f]{64}")


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

    @property
    def end(self) -> int:
        """The place after its last feature token."""
        return self.offset + self.length

    def shifted(self, by: int) -> ImageSpan:
        """The span in a sequence with `by` more tokens before it."""
        return ImageSpan(self.offset + by, self.length, self.grid, self.digest)


def why_misplaced(spans: Sequence[ImageSpan], num_ids: int) -> str:
    """What is wrong with the spans of a sequence of `num_ids` tokens; empty if nothing is."""
    end = 0
    for span in spans:
        name = f"the image {span.digest[:12]}..."
        if not _DIGEST.fullmatch(span.digest):
            return (
                f"an image has the digest {span.digest!r}: give the SHA-256 of its file, 64 "
                "hexadecimal digits"
            )
        if len(span.grid) not in (1, 3) or not all(size > 0 for size in span.grid):
            return f"{name} has the grid {span.grid}: give one or three sizes above 0"
        if span.length < 1 or span.offset < 0 or span.end > num_ids:
            return (
                f"{name} has the tokens {span.offset} to {span.end - 1}, and there are {num_ids}: "
                "an image is never cut"
            )
        if span.offset < end:
            return (
                f"{name} begins at token {span.offset}, before the end of the image in front of "
                "it: give the images in the order of their tokens"
            )
        end = span.end
    return ""


def feature_places(ids: np.ndarray, span: ImageSpan) -> np.ndarray:
    """The places int64 among `ids` [T] of the feature tokens of a span, in the order of the
    image's features. A feature token has the id of the span's first token. Raises ValueError if
    their number is not that of the span's grid."""
    inside = ids[span.offset : span.end]
    places = np.flatnonzero(inside == inside[:1])
    # With M-RoPE, a token has merge * merge patches, and no other token is among the features.
    wanted = span.grid[0] if len(span.grid) == 1 else span.length
    if (
        len(places) != wanted
        or places[-1:].tolist() != [span.length - 1]
        or math.prod(span.grid) % wanted
    ):
        raise ValueError(
            f"the image {span.digest[:12]}... has {len(places)} feature tokens among the "
            f"{span.length} of its span, which do not fit its grid {span.grid}"
        )
    return places + span.offset
