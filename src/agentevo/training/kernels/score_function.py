"""Scores of tokens: the logits that a model makes of its output layer's products, divided by the
temperature, with penalties, and without the tokens that can't be sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from agentevo.models.token_rows import LOWEST
from agentevo.runtime.devices import compiles
from agentevo.training.kernels.cells import Cell, Cells
from agentevo.training.kernels.token_masks import mask_scores
from agentevo.training.kernels.token_penalties import PenaltyTable
from agentevo.training.kernels.vocabulary import VocabularySlice


class ScoreFunction(NamedTuple):
    """Computes the scores of a cell from its products."""

    temperature: float
    softcap: float | None
    logit_scale: float
    masks: torch.Tensor | None = None
    """[R, W]; see token_masks.py."""
    penalties: PenaltyTable | None = None
    num_tokens: int | None = None
    """The number of ids that are tokens. Later ids have no probability."""
    banned: torch.Tensor | None = None
    """[K] int64: ids of the whole vocabulary that have no probability."""
    vocabulary_slice: VocabularySlice | None = None
    """The tokens of the weight. Masks and penalties cover only these tokens."""

    def within(self, vocabulary_slice: VocabularySlice | None) -> ScoreFunction:
        """The function for the tokens of a slice, from masks and penalties of the whole
        vocabulary."""
        if vocabulary_slice is None:
            return self
        masks = vocabulary_slice.masks(self.masks)
        penalties = vocabulary_slice.penalties(self.penalties)
        return self._replace(vocabulary_slice=vocabulary_slice, masks=masks, penalties=penalties)

    def divide(
        self, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[Cells, torch.Tensor | slice]:
        """The cells of the scores of the weight's tokens, and the indices of those of the targets
        [M] that are among these tokens."""
        local_targets = self._local_targets(targets)
        local_rows = rows[local_targets]
        tokens = targets[local_targets] - self.first
        return Cells.of(hidden, self._width(weight), local_rows, tokens), local_targets

    @property
    def first(self) -> int:
        return 0 if self.vocabulary_slice is None else self.vocabulary_slice.first

    def _width(self, weight: torch.Tensor) -> int:
        """The number of the weight's rows that are tokens."""
        rows = len(weight)
        return rows if self.num_tokens is None else min(max(self.num_tokens - self.first, 0), rows)

    def within_tokens(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The targets [M], in which ids that are no tokens are replaced by a token, and the places
        of these ids (None if every id is a token). Banned targets get LOWEST from their scores."""
        if self.num_tokens is None:
            return targets, None
        outside = targets >= self.num_tokens
        return targets.masked_fill(outside, 0), outside

    def _local_targets(self, targets: torch.Tensor) -> torch.Tensor | slice:
        """The indices of the targets [M] that are tokens of the weight."""
        if self.vocabulary_slice is None:
            return slice(None)
        return (
            ((targets >= self.vocabulary_slice.first) & (targets < self.vocabulary_slice.end))
            .nonzero()
            .squeeze(1)
        )

    def is_plain(self, hidden: torch.Tensor) -> bool:
        """Whether a cell's arithmetic is one kernel (linear_logprobs.py)."""
        changes = (self.softcap, self.masks, self.penalties, self.banned)
        changed = any(change is not None for change in changes)
        narrow = hidden.dtype.itemsize <= torch.float32.itemsize
        return narrow and not changed and compiles(hidden.device.type)

    @property
    def slope(self) -> float:
        """The derivative of the scores with respect to the products, without the effect of a
        cap."""
        return self.logit_scale / self.temperature

    def bend(self, products: torch.Tensor) -> torch.Tensor:
        """tanh(logits / softcap), in at least float32."""
        assert self.softcap is not None
        return (products.to(sum_dtype(products)) * (self.logit_scale / self.softcap)).tanh_()

    def scores(
        self, products: torch.Tensor, cell: Cell, bent: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores in at least float32, LOWEST for forbidden tokens. If the scores equal the
        products, these are returned."""
        scores = self.plain_scores(products, bent)
        if self.penalties is not None:
            cell_penalties = self.penalties.within(cell.rows, cell.columns)
            scores = cell_penalties.apply(scores, self.temperature)
        if self.banned is not None:
            inside = self.banned - (self.first + cell.columns.start)
            inside = inside[(inside >= 0) & (inside < scores.shape[1])]
            scores = scores.index_fill(1, inside, LOWEST)
        if self.masks is None:
            return scores
        return mask_scores(scores, self.masks[cell.rows], cell.columns.start)

    def plain_scores(self, products: torch.Tensor, bent: torch.Tensor | None) -> torch.Tensor:
        """The scores without penalties and masks."""
        if self.softcap is None:
            exact = products.to(sum_dtype(products))
            return exact if self.slope == 1.0 else exact * self.slope
        bent = self.bend(products) if bent is None else bent
        return bent * (self.softcap / self.temperature)


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which sums over such a tensor are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)
