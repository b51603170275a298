"""Pictures of grids, drawn with numpy: no display, no fonts and no files.

A cell is a square of uint8 [N, N, 3]. Shapes are drawn with whole numbers, so a picture has the
same pixels on every machine. Its PNG has the same bytes wherever Pillow and its zlib are the same.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np

Colour = tuple[int, int, int]
Cell = np.ndarray
Shape = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(rows, columns, N) -> the mask [N, N] of a shape. Rows and columns are twice the distance of a
pixel's centre to the cell's centre, so they are whole numbers from 1 - N to N - 1."""


def empty_cell(pixels: int, colour: Colour) -> Cell:
    """A cell of one colour with a thin darker edge, which shows the grid."""
    cell = np.empty((pixels, pixels, 3), np.uint8)
    cell[:] = colour
    edge = [value * 3 // 4 for value in colour]
    cell[-1], cell[:, -1] = edge, edge
    return cell


def with_shape(cell: Cell, shape: Shape, colour: Colour) -> Cell:
    """The cell with a shape on it."""
    pixels = len(cell)
    distances = 2 * np.arange(pixels) + 1 - pixels
    drawn = cell.copy()
    drawn[shape(distances[:, None], distances[None, :], pixels)] = colour
    return drawn


def disc(percent: int) -> Shape:
    """A disc whose diameter is that share of the cell."""
    return lambda rows, columns, pixels: 10_000 * (rows**2 + columns**2) <= (percent * pixels) ** 2


def square(percent: int) -> Shape:
    """A square whose side is that share of the cell."""
    return lambda rows, columns, pixels: (
        100 * np.maximum(np.abs(rows), np.abs(columns)) <= percent * pixels
    )


def ring(outer: int, inner: int) -> Shape:
    """A disc with a hole, by their diameters as shares of the cell."""
    return lambda rows, columns, pixels: (
        disc(outer)(rows, columns, pixels) & ~disc(inner)(rows, columns, pixels)
    )


def cross(percent: int) -> Shape:
    """Two diagonals within a square whose side is that share of the cell."""
    return lambda rows, columns, pixels: (
        square(percent)(rows, columns, pixels)
        & (8 * np.abs(np.abs(rows) - np.abs(columns)) <= pixels)
    )


def grid_png(cells: Sequence[Cell], columns: int) -> bytes:
    """The cells, row by row, as the bytes of a PNG."""
    import PIL.Image

    rows = [np.hstack(cells[start : start + columns]) for start in range(0, len(cells), columns)]
    file = io.BytesIO()
    PIL.Image.fromarray(np.vstack(rows)).save(file, "PNG")
    return file.getvalue()
