"""The positions of the tokens of a sequence with images.

A position is a property of a token: it depends only on the tokens before it on its path and on the
grids of the images among them. It never depends on a pass, a batch or what a module remembers of
its last call, so the engine, the packed tree and rows give a token the same position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentevo.types.image_span import ImageSpan


def plain_positions(length: int) -> np.ndarray:
    """[1, length] int64"""
    return np.arange(length, dtype=np.int64)[None]


def mrope_positions(length: int, spans: Sequence[ImageSpan], merge: int) -> np.ndarray:
    """[3, length] int64: time, height and width of each token (M-RoPE, arXiv 2409.12191, section
    2.1), for a sequence from its first token. A text token has the same number three times. An
    image's tokens count t, h and w from the position after the previous token, and the next
    token's position is max(h, w) later. `merge`: the number of patches along one side of a token.
    """
    positions = np.empty((3, length), dtype=np.int64)
    place = position = 0
    for span in spans:
        text = np.arange(span.offset - place) + position
        positions[:, place : span.offset] = text
        position += len(text)

        frames = span.grid[0]
        height = span.grid[1] // merge
        width = span.grid[2] // merge
        place = span.offset + span.length
        grid = np.indices((frames, height, width)).reshape(3, -1)
        positions[:, span.offset : place] = grid + position
        position += max(height, width)

    positions[:, place:] = np.arange(length - place) + position
    return positions
