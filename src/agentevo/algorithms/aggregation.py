"""From losses per token to one number, by weights that belong to the whole batch.

aggregate(values) = sum over trained tokens of weight * value. Since the weights are set on the
whole batch, the sum over any split of its rows (micro-batches, ranks) is the same loss with the
same gradient: compute `aggregation_weights` once on the whole batch, hand every part its rows of
it, and add up. Sequences and trajectories without trained tokens count for nothing, also not in the
divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from agentevo.algorithms.blocks import row_lengths
from agentevo.catalogue import Value, resolve
from agentevo.catalogue.aggregations import AGGREGATIONS


def trained_tokens(mask: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """The mask as bool, [S, T]. Raises ValueError unless it has two dimensions and `shape`, if that
    is given."""
    if mask.dim() != 2 or (shape is not None and mask.shape != shape):
        wanted = (
            "[sequences, tokens]"
            if shape is None or len(shape) != 2
            else f"{list(shape)}, the shape of the values"
        )
        raise ValueError(f"mask has shape {list(mask.shape)}: give {wanted}")
    return mask if mask.dtype == torch.bool else mask != 0


def integer_ids(
    what: str, ids: Sequence[Hashable] | torch.Tensor, rows: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Names of rows as whole numbers 0 .. count-1 (int64 [S]) and the count. `ids`: S hashables or
    an int tensor [S]."""
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} {what} for {rows} rows: give one per row")
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 1 or ids.is_floating_point():
            raise ValueError(
                f"{what} have shape {list(ids.shape)} and type {ids.dtype}: give whole numbers "
                f"of shape [{rows}]"
            )
        names, index = torch.unique(ids.to(device), return_inverse=True)
        return index, len(names)
    number: dict[Hashable, int] = {}
    return torch.tensor(
        [number.setdefault(name, len(number)) for name in ids], dtype=torch.int64, device=device
    ), len(number)


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
    totals = torch.zeros_like(lengths).index_add_(
        0, trajectories, lengths
    )  # [S]: trajectories are at most as many as rows
    return (_seq_mean_token_mean(totals, trajectories))[trajectories]


ROW_WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "per-trajectory-token-mean": _per_trajectory_token_mean,
}
"""Each takes the trained lengths [S] float64 and the trajectory of each row [S] int64, and gives
the weight of a token of each row [S]."""


def row_weights(
    name: str,
    mask: torch.Tensor,
    *,
    trajectory_ids: Sequence[Hashable] | torch.Tensor | None = None,
    **hyper: Value,
) -> torch.Tensor:
    """The weight of each row's trained tokens, [S, 1] float64. Arguments and errors as of
    `aggregation_weights`."""
    settings = resolve("aggregation", AGGREGATIONS, name, hyper)
    trained = trained_tokens(mask)
    rows = trained.shape[0]
    if trajectory_ids is None:
        trajectories = torch.arange(rows, device=mask.device)
    else:
        trajectories, _ = integer_ids("trajectory_ids", trajectory_ids, rows, mask.device)
    return ROW_WEIGHTS[name](row_lengths(trained), trajectories, **settings)[:, None]


def aggregation_weights(
    name: str,
    mask: torch.Tensor,
    *,
    trajectory_ids: Sequence[Hashable] | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **hyper: Value,
) -> torch.Tensor:
    """The weight of every token, [S, T]; 0 where the mask is 0. Formulas: `AGGREGATIONS` in the
    catalogue.

    mask [S, T] bool or 0/1. `trajectory_ids` (S hashables or int tensor [S]; None: each row is its
    own trajectory) matters for per-trajectory-token-mean only. Computed in float64, given in
    `dtype`. Raises ValueError for unknown names, hyper-parameters and shapes.
    """
    return torch.where(
        trained_tokens(mask),
        row_weights(name, mask, trajectory_ids=trajectory_ids, **hyper).to(dtype),
        0.0,
    )


def check_weights(weights: torch.Tensor, shape: torch.Size) -> None:
    """Raises ValueError unless there is one weight per token."""
    if weights.shape != shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)}, values {list(shape)}: give one weight "
            "per token"
        )


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """sum of weights * values over trained tokens: a scalar of the values' dtype. Whatever stands
    elsewhere (NaN too) plays no part.

    values, weights, mask [S, T]. Half-precision values are summed in float32.
    """
    trained = trained_tokens(mask, values.shape)
    check_weights(weights, values.shape)
    terms = torch.where(trained, values, values.new_zeros(())) * torch.where(
        trained, weights, weights.new_zeros(())
    )
    return terms.sum().to(values.dtype)


def aggregate(
    name: str,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    trajectory_ids: Sequence[Hashable] | torch.Tensor | None = None,
    **hyper: Value,
) -> torch.Tensor:
    """One number from values [S, T]: `weighted_sum` with `aggregation_weights`. A scalar of the
    values' dtype, differentiable in them."""
    trained_tokens(mask, values.shape)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return weighted_sum(
        values,
        aggregation_weights(name, mask, trajectory_ids=trajectory_ids, dtype=dtype, **hyper),
        mask,
    )
