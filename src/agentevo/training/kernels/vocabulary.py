"""An output layer whose vocabulary is split over processes. Each process computes the scores of its
own tokens, and one maximum and one sum over processes merge the results.

Given the running maximum a, s = sum e^(z - a) and t = sum e^(z - a) (z - a) of each process
(linear_logprobs.py), the maximum A over processes makes them terms of one sum: s e^(a - A) and (t +
s (a - A)) e^(a - A). The score of a target comes from the process that has its token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from agentevo.training.collectives import Ranks, copy_to_group, gather_columns
from agentevo.training.kernels.token_penalties import PenaltyTable

STEP = 32
"""A slice begins at a multiple of this: a word of a token mask covers this many tokens."""


@dataclass(frozen=True, eq=False)
class VocabularySlice:
    """The tokens of this process, if the vocabulary is split over processes."""

    ranks: Ranks
    sizes: tuple[int, ...]
    """The number of tokens of each process."""

    @classmethod
    def of(cls, ranks: Ranks, num_tokens: int) -> VocabularySlice:
        blocks = -(-num_tokens // STEP)
        bounds = [
            min(place * blocks // ranks.size * STEP, num_tokens) for place in range(ranks.size + 1)
        ]
        return cls(ranks, tuple(end - first for first, end in itertools.pairwise(bounds)))

    @property
    def first(self) -> int:
        return sum(self.sizes[: self.ranks.rank])

    @property
    def end(self) -> int:
        return self.first + self.sizes[self.ranks.rank]

    def masks(self, masks: torch.Tensor | None) -> torch.Tensor | None:
        """Token masks of only these tokens."""
        return None if masks is None else masks[:, self.first // 32 :]

    def penalties(self, table: PenaltyTable | None) -> PenaltyTable | None:
        """Penalties of only these tokens."""
        if table is None:
            return None
        all_rows = slice(0, int(table.rows[-1]) + 1 if len(table.rows) else 0)
        return table.within(all_rows, slice(self.first, self.end))

    def combine(
        self,
        top: torch.Tensor,
        sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        picked: torch.Tensor,
        local_targets: torch.Tensor,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The maximum, sum, moment and sum of squares [R] over all tokens, and the scores [count]
        of the targets. `local_targets` [m] are this process's targets, with the scores `picked`
        [m]."""
        highest = top.clone()
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self.ranks.group)

        total, moment, squares = sums
        fall = top - highest
        fade = fall.exp()
        chosen = picked.new_zeros(count).index_copy_(0, local_targets, picked)
        terms = torch.cat(
            [total * fade, (moment + total * fall) * fade, squares * fade.square(), chosen]
        )
        distributed.all_reduce(terms, group=self.ranks.group)
        of_row = terms[: 3 * len(top)].view(3, -1)
        rest = terms[3 * len(top) :]
        return highest, of_row[0], of_row[1], of_row[2], rest

    def __deepcopy__(self, memo: object) -> VocabularySlice:
        return self


class VocabularyLinear(nn.Linear):
    """An output layer over a slice of the vocabulary. A call returns the logits of the whole
    vocabulary. Losses that support slices (output_layer.py) never compute them."""

    slice: VocabularySlice

    @classmethod
    def sharing(cls, linear: nn.Linear, vocabulary_slice: VocabularySlice) -> VocabularyLinear:
        """A layer with the same parameters as `linear`, which are slices already."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        vars(layer).update({k: v for k, v in vars(linear).items() if k.startswith("_agentevo")})
        layer.in_features = linear.in_features
        layer.out_features = sum(vocabulary_slice.sizes)
        layer.weight = linear.weight
        layer.bias = linear.bias
        layer.training = linear.training
        layer.slice = vocabulary_slice
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = copy_to_group(input, self.slice.ranks)
        logits = nn.functional.linear(x, self.weight, self.bias)
        return gather_columns(logits, self.slice.ranks, self.slice.sizes)


def slice_of(layer: Any) -> VocabularySlice | None:
    """The slice of an output layer. None if the layer has all tokens."""
    return layer.slice if isinstance(layer, VocabularyLinear) else None
