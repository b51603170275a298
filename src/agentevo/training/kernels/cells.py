"""Divides rows and vocabulary into cells, so that code can compute the scores of all tokens cell by
cell without holding all of them at once (linear_logprobs.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

CELL_BYTES = {"cpu": 8 * 2**20}
"""The size of a cell's float32 scores on a CPU, in bytes. It is about the size of the caches;
smaller cells are no faster, and threads wait for each other more often. On other devices it is
OTHER_CELL_BYTES, which is enough to fill the device."""
OTHER_CELL_BYTES = 128 * 2**20
CELL_ROWS = {"cpu": 1024}
OTHER_CELL_ROWS = 4096
COLUMN_STEP = 64
"""The number of columns of a cell is a multiple of this, if the vocabulary is large enough."""


class Cell(NamedTuple):
    """Some rows, and some tokens of the vocabulary."""

    rows: slice
    columns: slice
    chosen: torch.Tensor
    """The indices of those of the M targets that are in the cell."""
    places: tuple[torch.Tensor, torch.Tensor]
    """The rows and columns of these targets within the cell."""


@dataclass(frozen=True, eq=False)
class Cells:
    """R rows x V columns, divided into cells. The outer loop is over columns, the inner loop over
    rows."""

    rows: list[slice]
    columns: list[slice]
    order: torch.Tensor
    """[M] the indices of the targets, sorted by cell."""
    bounds: list[int]
    """The index in `order` at which each cell begins."""
    places: tuple[torch.Tensor, torch.Tensor]
    """[M] the row and column of each target."""

    @classmethod
    def of(
        cls, hidden: torch.Tensor, num_columns: int, rows: torch.Tensor, targets: torch.Tensor
    ) -> Cells:
        kind = hidden.device.type
        num_rows = len(hidden)
        height = _even_part(num_rows, CELL_ROWS.get(kind, OTHER_CELL_ROWS))
        width = _even_part(
            num_columns,
            max(COLUMN_STEP, CELL_BYTES.get(kind, OTHER_CELL_BYTES) // (4 * height)),
            COLUMN_STEP,
        )

        of_rows = [
            slice(start, min(start + height, num_rows)) for start in range(0, num_rows, height)
        ]
        of_columns = [
            slice(start, min(start + width, num_columns)) for start in range(0, num_columns, width)
        ]
        cell, order = torch.sort(targets // width * len(of_rows) + rows // height)
        starts = torch.arange(len(of_rows) * len(of_columns) + 1, device=cell.device)
        return cls(
            of_rows, of_columns, order, torch.searchsorted(cell, starts).tolist(), (rows, targets)
        )

    def together(self, values: torch.Tensor) -> torch.Tensor:
        """[M]: for each target, the sum of `values` [M] over all targets that are the same token of
        the same row."""
        rows, targets = self.places
        _, which = (rows * (int(targets.max()) + 1) + targets).unique(return_inverse=True)
        return torch.zeros_like(values).index_add_(0, which, values)[which]

    def in_column(self, index: int) -> Iterator[Cell]:
        columns = self.columns[index]
        for number, part in enumerate(self.rows, index * len(self.rows)):
            chosen = self.order[self.bounds[number] : self.bounds[number + 1]]
            rows, targets = (places[chosen] for places in self.places)
            yield Cell(part, columns, chosen, (rows - part.start, targets - columns.start))


def _even_part(total: int, largest: int, step: int = 1) -> int:
    """Splits `total` into the fewest equal parts of at most `largest`. Returns their length,
    rounded up to a multiple of `step`."""
    count = max(1, -(-total // largest))
    return max(1, -(-total // (count * step)) * step)
