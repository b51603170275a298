"""Applies penalties (agentevo/penalties.py) to scores. They change a few tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from agentevo.types.penalties import PenaltyChanges


class PenaltyTable(NamedTuple):
    """N changes of scores [R, V], sorted by row. Each element has at most one."""

    rows: torch.Tensor
    """[N] int64"""
    tokens: torch.Tensor
    """[N] int64"""
    offsets: torch.Tensor
    """[N] float32, added to the logit"""
    repeated: torch.Tensor
    """[N] float32: the divisor of a positive logit and the factor of any other"""

    @classmethod
    def of(cls, changes: Mapping[int, PenaltyChanges], device: torch.device) -> PenaltyTable | None:
        """The table of a batch's rows. None if nothing changes."""
        if not changes:
            return None

        rows = sorted(changes)
        columns = [
            np.concatenate(column) for column in zip(*(changes[r] for r in rows), strict=True)
        ]
        of_rows = np.repeat(rows, [len(changes[r].tokens) for r in rows])
        return cls(*(torch.as_tensor(column, device=device) for column in (of_rows, *columns)))

    def within(self, rows: slice, columns: slice) -> PenaltyTable:
        """The changes within a cell. Their rows and columns count from the cell's first."""
        bounds = torch.tensor([rows.start, rows.stop], device=self.rows.device)
        first, last = torch.searchsorted(self.rows, bounds).tolist()
        entries = slice(first, last)
        inside = (self.tokens[entries] >= columns.start) & (self.tokens[entries] < columns.stop)
        of_rows, tokens, offsets, repeated = (column[entries][inside] for column in self)
        return PenaltyTable(of_rows - rows.start, tokens - columns.start, offsets, repeated)

    def slopes(self, scores: torch.Tensor) -> torch.Tensor:
        """[N], the derivative of the changed scores at these elements with respect to the scores,
        which are the logits divided by the temperature."""
        chosen = scores[self.rows, self.tokens]
        return torch.where(chosen > 0, 1 / self.repeated, self.repeated)

    def apply(self, scores: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """The changed scores, in a new tensor; differentiable."""
        chosen = scores[self.rows, self.tokens]
        changed = chosen * self.slopes(scores.detach()) + self.offsets / temperature
        return scores.index_put((self.rows, self.tokens), changed.to(scores.dtype))
