"""From losses per token to one number, by weights that belong to the whole minibatch.

    loss = sum over trained tokens of weight(row of the token) * token loss

The weights are set on the whole minibatch, so the sum over any split of its rows (micro-batches,
ranks) is the same loss with the same gradient: take the weights once, give every part the weights
of its rows, and add up. Rows and trajectories without trained tokens do not count, not even in a
divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch

from agentevo.catalogue import Value, resolve
from agentevo.catalogue.aggregations import AGGREGATIONS


def _token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return (1.0 / lengths.sum().clamp(min=1.0)).expand_as(lengths)


def _seq_mean_token_sum(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return (1.0 / (lengths > 0).sum(dtype=lengths.dtype).clamp(min=1.0)).expand_as(lengths)


def _seq_mean_token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return _seq_mean_token_sum(lengths, trajectories) / lengths.clamp(min=1.0)


def _seq_mean_token_sum_norm(
    lengths: torch.Tensor, trajectories: torch.Tensor, *, norm: float
) -> torch.Tensor:
    return _seq_mean_token_sum(lengths, trajectories) / norm


def _per_trajectory_token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    # [S]: there are at most as many trajectories as rows
    totals = torch.zeros_like(lengths).index_add_(0, trajectories, lengths)
    return _seq_mean_token_mean(totals, trajectories)[trajectories]


ROW_WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "per-trajectory-token-mean": _per_trajectory_token_mean,
}
"""Each takes the number of trained tokens of each row [S] float64 and the number of its trajectory
[S] int64, and gives the weight of a token of each row [S]."""

Aggregation = Callable[[torch.Tensor, Sequence[Hashable]], torch.Tensor]
"""Maps (trained tokens of each row [S], trajectory id of each row) to the weight of a token of each
row, [S] float64, which is 0 for a row without trained tokens. Raises ValueError unless there is one
id per row."""


def bind_aggregation(name: str, hyper: Mapping[str, Value]) -> Aggregation:
    """The aggregation of that name with its hyper-parameters. Formulas: `AGGREGATIONS` in the
    catalogue. Raises ValueError for unknown names and wrong hyper-parameters."""
    settings = resolve("aggregation", AGGREGATIONS, name, hyper)
    row_weights = partial(ROW_WEIGHTS[name], **settings)

    def weights(lengths: torch.Tensor, trajectory_ids: Sequence[Hashable]) -> torch.Tensor:
        if len(trajectory_ids) != len(lengths):
            raise ValueError(
                f"{len(trajectory_ids)} trajectory ids for {len(lengths)} rows: give one per row"
            )

        numbers: dict[Hashable, int] = {}
        trajectories = [
            numbers.setdefault(trajectory_id, len(numbers)) for trajectory_id in trajectory_ids
        ]
        lengths = lengths.double()
        of_row = row_weights(lengths, torch.tensor(trajectories, dtype=torch.int64))
        return torch.where(lengths > 0, of_row, 0.0)

    return weights
