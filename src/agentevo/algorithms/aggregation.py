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
from typing import TypeAlias

from agentevo.algorithms.entries import AlgorithmEntry, EntryTable, Hyperparameter, Value
from agentevo.algorithms.lazy_torch import torch

AGGREGATIONS = EntryTable("aggregation", AlgorithmEntry)
"""Each takes the number of trained tokens of each row [S] float64 and the number of its trajectory
[S] int64, and gives the weight of a token of each row [S]. In the formulas l_it is the loss of
token t of row i, and m_it is 1 where the token is trained, else 0."""


@AGGREGATIONS.entry(
    name="token-mean",
    meaning="every trained token counts the same, so long sequences weigh more",
    formula="sum_{i,t} m_it l_it / sum_{i,t} m_it",
    source="DAPO, arXiv 2503.14476, eq. 12",
    peers={"verl": "token-mean", "TRL": "loss_type dapo (bnpo: per micro-batch)"},
)
def _token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return (1.0 / lengths.sum().clamp(min=1.0)).expand_as(lengths)


@AGGREGATIONS.entry(
    name="seq-mean-token-sum",
    meaning="mean over sequences of the sum over their tokens: the plain policy gradient",
    formula="1/N sum_i sum_t m_it l_it, N = sequences with trained tokens",
    source="REINFORCE; Dr.GRPO before its constant divisor, arXiv 2503.20783",
    peers={"verl": "seq-mean-token-sum", "TRL": "loss_type luspo"},
)
def _seq_mean_token_sum(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return (1.0 / (lengths > 0).sum(dtype=lengths.dtype).clamp(min=1.0)).expand_as(lengths)


@AGGREGATIONS.entry(
    name="seq-mean-token-mean",
    meaning="every sequence counts the same, so tokens of long sequences weigh less",
    formula="1/N sum_i (sum_t m_it l_it / sum_t m_it), N = sequences with trained tokens",
    source="GRPO, arXiv 2402.03300, eq. 3",
    peers={"verl": "seq-mean-token-mean", "TRL": "loss_type grpo"},
)
def _seq_mean_token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    return _seq_mean_token_sum(lengths, trajectories) / lengths.clamp(min=1.0)


@AGGREGATIONS.entry(
    name="seq-mean-token-sum-norm",
    meaning="mean over sequences of the sum over tokens, divided by one constant length: no "
    "length bias",
    formula="1/(N norm) sum_i sum_t m_it l_it, N = sequences with trained tokens",
    source="Dr.GRPO, arXiv 2503.20783, listing 1",
    hyper=(
        Hyperparameter(
            "norm",
            None,
            "constant that every sequence's sum is divided by, e.g. the longest response allowed",
            0.0,
            low_allowed=False,
        ),
    ),
    peers={
        "verl": "seq-mean-token-sum-norm with loss_scale_factor (before 0.9: no 1/N)",
        "TRL": "loss_type dr_grpo, norm = max_completion_length",
    },
)
def _seq_mean_token_sum_norm(
    lengths: torch.Tensor, trajectories: torch.Tensor, *, norm: float
) -> torch.Tensor:
    return _seq_mean_token_sum(lengths, trajectories) / norm


@AGGREGATIONS.entry(
    name="per-trajectory-token-mean",
    meaning="every trajectory counts the same, however many rows (branches, turns) it was cut into",
    formula="1/K sum_k (sum_{i in k} sum_t m_it l_it / sum_{i in k} sum_t m_it), K = trajectories "
    "with trained tokens",
    source="AgentEvo; equals seq-mean-token-mean where each trajectory is one row",
)
def _per_trajectory_token_mean(lengths: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    # [S]: there are at most as many trajectories as rows
    totals = torch.zeros_like(lengths).index_add_(0, trajectories, lengths)
    return _seq_mean_token_mean(totals, trajectories)[trajectories]


Aggregation: TypeAlias = "Callable[[torch.Tensor, Sequence[Hashable]], torch.Tensor]"
"""Maps (trained tokens of each row [S], trajectory id of each row) to the weight of a token of each
row, [S] float64, which is 0 for a row without trained tokens. Raises ValueError unless there is one
id per row."""


def bind_aggregation(name: str, hyper: Mapping[str, Value]) -> Aggregation:
    """The aggregation of that name with its hyper-parameters. Raises ValueError for unknown names
    and wrong hyper-parameters."""
    settings = AGGREGATIONS.resolve(name, hyper)
    row_weights = partial(AGGREGATIONS[name].function, **settings)

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
