"""The inputs of every advantage: the caller's tensors and ids, checked and numbered.

Tables [S, T] are not copied: they are checked in blocks of rows, and recursions select the trained
places themselves (`returns.TurnStream.at`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agentevo.algorithms.blocks import block_rows, row_blocks, row_lengths
from agentevo.algorithms.group_relative import MAX_MAGNITUDE, Members
from agentevo.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Ids: TypeAlias = "Sequence[Hashable] | Tensor"


@dataclass(frozen=True, kw_only=True)
class AdvantageTables:
    """The inputs of an advantage, as the caller has them: S rows of T tokens. `Advantage.needs`
    names the optional tables that an estimator requires."""

    token_rewards: Tensor
    """[S, T] floats."""
    mask: Tensor
    """[S, T] bool or 0/1: trained tokens."""
    group_ids: Ids
    """[S]: rows of one task have the same id."""
    trajectory_ids: Ids | None = None
    """[S]: rows of one attempt have the same id. None: each row is an attempt of its own."""
    values: Tensor | None = None
    """[S, T]."""
    baseline_rewards: Tensor | None = None
    """[S]: the reward of the task's greedy attempt."""
    turn_ids: Tensor | None = None
    """[S, T] integers: the turn of each trained token, increasing along the trajectory."""
    turn_parents: Tensor | None = None
    """[S, T] integers: the turn that this one continues."""
    turn_observations: Tensor | None = None
    """[S, T] integers: turns of a group that answer the same observation have the same number."""
    reward_parts: Mapping[str, Tensor] | Tensor | None = None
    """Name -> [S], or [K, S]: the trajectory's score by each reward, repeated at each of its
    rows."""
    reward_weights: Mapping[str, float] | Sequence[float] | None = None
    """Weight of each reward part, by name or in the order of the parts. None: each weighs 1."""
    logp: Tensor | None = None
    """[S, T]."""
    sum_pi_squared: Tensor | None = None
    """[S, T]: the chance that two draws of the token agree."""
    process_rewards: Tensor | None = None
    """[S, T]."""
    turn_credit: Tensor | None = None
    """[S, T]: at each trained token the reward of its turn, by a function of the user."""


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of an advantage: S rows of T tokens in N trajectories, without gradients.

    Tables [S, T] are the caller's: finite at trained tokens, and anything elsewhere. All other
    floats are float64 and within +-MAX_MAGNITUDE.
    """

    mask: Tensor
    """[S, T] bool: trained tokens."""
    rewards: Tensor
    """[S, T]."""
    trajectory: Tensor
    """[S] int64 in 0..N-1, numbered by first row."""
    members: Members
    """The groups of the N trajectories, and which of these have any trained tokens."""
    score: Tensor
    """[N]: the sum of each trajectory's rewards."""
    row_length: Tensor
    """[S]: the number of trained tokens of each row."""
    length: Tensor
    """[N]: the number of trained tokens of each trajectory."""
    values: Tensor | None
    """[S, T]."""
    baseline_rewards: Tensor | None
    """[S]."""
    turn_ids: Tensor | None
    """[S, T] int64."""
    turn_parents: Tensor | None
    """[S, T] int64."""
    turn_observations: Tensor | None
    """[S, T] int64."""
    reward_parts: Tensor | None
    """[K, N]."""
    reward_weights: tuple[float, ...] | None
    """[K]: the weight of each reward part."""
    logp: Tensor | None
    """[S, T]."""
    sum_pi_squared: Tensor | None
    """[S, T]."""
    process_rewards: Tensor | None
    """[S, T]."""
    turn_credit: Tensor | None
    """[S, T]."""

    def trajectory_name(self, index: int) -> str:
        """The name of a trajectory in error messages."""
        return f"the trajectory that begins in row {int((self.trajectory == index).nonzero()[0])}"


def check_tables(tables: AdvantageTables) -> Inputs:
    """Checks the caller's tables. Raises ValueError for a wrong shape or type, and for NaN or
    infinity at a trained token."""
    like = tables.token_rewards
    shape = tables.token_rewards.shape
    if len(shape) != 2 or not like.is_floating_point():
        raise ValueError(
            f"token_rewards is {like.dtype} {list(shape)}: give floats of shape [sequences, tokens]"
        )

    trained = _trained_mask(tables.mask, like)
    trajectory = _number_ids(
        "trajectory_ids",
        range(shape[0]) if tables.trajectory_ids is None else tables.trajectory_ids,
        like,
    )
    row_group = _number_ids("group_ids", tables.group_ids, like)
    num = int(trajectory.max()) + 1 if shape[0] else 0
    group = row_group.new_zeros(num).index_copy_(0, trajectory, row_group)
    if bool((group[trajectory] != row_group).any()):
        row = int((group[trajectory] != row_group).nonzero()[0])
        raise ValueError(
            f"group_ids: the trajectory of row {row} has rows in several groups: give all of its "
            "rows one group id"
        )

    row_score = _row_sums("token_rewards", like, trained)
    row_length = row_lengths(trained)
    length = row_length.new_zeros(num).index_add_(0, trajectory, row_length)
    counts = length > 0.0
    parts = tables.reward_parts
    baseline = tables.baseline_rewards

    return Inputs(
        mask=trained,
        rewards=like.detach(),
        trajectory=trajectory,
        members=Members(group, counts),
        score=row_score.new_zeros(num).index_add_(0, trajectory, row_score),
        row_length=row_length,
        length=length,
        values=_table("values", tables.values, trained),
        baseline_rewards=None
        if baseline is None
        else _per_row("baseline_rewards", baseline, row_length > 0.0),
        turn_ids=_turns("turn_ids", tables.turn_ids, trained),
        turn_parents=_turns("turn_parents", tables.turn_parents, trained),
        turn_observations=_turns("turn_observations", tables.turn_observations, trained),
        reward_parts=None if parts is None else _parts(parts, trajectory, counts),
        reward_weights=None if parts is None else _weights(tables.reward_weights, parts),
        logp=_table("logp", tables.logp, trained),
        sum_pi_squared=_table("sum_pi_squared", tables.sum_pi_squared, trained),
        process_rewards=_table("process_rewards", tables.process_rewards, trained),
        turn_credit=_table("turn_credit", tables.turn_credit, trained),
    )


def _table(name: str, table: Tensor | None, trained: Tensor) -> Tensor | None:
    """An optional table [S, T] without its gradient, checked."""
    if table is None:
        return None
    _row_sums(name, table, trained)  # for its checks
    return table.detach()


def _trained_mask(mask: Tensor, like: Tensor) -> Tensor:
    if mask.shape != like.shape:
        raise ValueError(
            f"mask has shape {list(mask.shape)}, token_rewards {list(like.shape)}: give both as "
            "[sequences, tokens]"
        )

    trained = mask if mask.dtype == torch.bool else mask != 0
    if mask.dtype != torch.bool and bool((trained & (mask != 1)).any()):
        raise ValueError(
            "mask has entries other than 0 and 1: give 1 at trained tokens and 0 elsewhere"
        )

    return trained


def _number_ids(name: str, ids: Ids | range, like: Tensor) -> Tensor:
    """[S] int64: the ids as numbers 0, 1, 2, ... in the order in which they first appear."""
    if isinstance(ids, torch.Tensor) and (ids.dim() != 1 or ids.is_floating_point()):
        raise ValueError(
            f"{name} is {ids.dtype} {list(ids.shape)}: give one integer or hashable per row"
        )

    listed = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if len(listed) != len(like):
        raise ValueError(
            f"{name}: {len(listed)} ids for {len(like)} rows: give one per row of token_rewards"
        )

    numbers: dict[Hashable, int] = {}
    return torch.tensor(
        [numbers.setdefault(name, len(numbers)) for name in listed],
        dtype=torch.int64,
        device=like.device,
    )


def _finite(name: str, values: Tensor, mask: Tensor, first: int = 0) -> Tensor:
    """`values` as bounded float64, with 0 wherever `mask` (of the same shape) is false. Raises
    ValueError for NaN or infinity where it is true.

    `first` is the row at which this block begins; error messages count from it.
    """
    finite = torch.where(mask, values.detach(), 0.0).double()
    if not bool(torch.isfinite(finite).all()):
        row, *column = (~torch.isfinite(finite)).nonzero()[0].tolist()
        place = [first + row, *column]
        raise ValueError(
            f"{name}: {float(finite[(row, *column)])} at {place}, where a token is trained: mask "
            "it out or mend its source"
        )

    return finite.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE) if values.dtype == torch.float64 else finite


def _row_sums(name: str, table: Tensor, trained: Tensor) -> Tensor:
    """[S]: the sum over each row's trained tokens. Raises ValueError for NaN or infinity among
    them, and for a shape that is not that of `trained`."""
    if table.shape != trained.shape:
        raise ValueError(
            f"{name} has shape {list(table.shape)}, token_rewards {list(trained.shape)}: give "
            "both as [sequences, tokens]"
        )

    rows = block_rows(table.shape[1])
    blocks = enumerate(row_blocks(table, trained))
    return torch.cat(
        [_finite(name, part, mask, rows * number).sum(1) for number, (part, mask) in blocks]
    )


def _per_row(name: str, values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise ValueError(
            f"{name} has shape {list(values.shape)}: give one number per row, [{len(mask)}]"
        )
    return _finite(name, values, mask)


def _turns(name: str, turns: Tensor | None, trained: Tensor) -> Tensor | None:
    if turns is None:
        return None

    if turns.shape != trained.shape or turns.is_floating_point() or turns.is_complex():
        raise ValueError(
            f"{name} is {turns.dtype} {list(turns.shape)}: give one for each token, integers "
            f"{list(trained.shape)}"
        )

    return turns.long()


def _parts(parts: Mapping[str, Tensor] | Tensor, trajectory: Tensor, counts: Tensor) -> Tensor:
    """[K, N]: the scores of each trajectory. Raises ValueError unless all rows of a trajectory have
    the same scores."""
    named = (
        parts.items()
        if isinstance(parts, Mapping)
        else [(f"[{index}]", part) for index, part in enumerate(parts)]
    )
    scores_of_parts = []
    for name, part in named:
        row_scores = _per_row(f"reward_parts {name}", part, counts[trajectory])
        scores = row_scores.new_zeros(len(counts)).index_copy_(0, trajectory, row_scores)
        if bool((scores[trajectory] != row_scores).any()):
            row = int((scores[trajectory] != row_scores).nonzero()[0])
            raise ValueError(
                f"reward_parts {name}: the trajectory of row {row} has different scores: repeat "
                "its score at each of its rows"
            )

        scores_of_parts.append(scores)

    if not scores_of_parts:
        raise ValueError("reward_parts is empty: give at least one reward")

    return torch.stack(scores_of_parts)


def _weights(
    weights: Mapping[str, float] | Sequence[float] | None, parts: Mapping[str, Tensor] | Tensor
) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * len(parts)

    if isinstance(weights, Mapping):
        if not isinstance(parts, Mapping) or set(weights) != set(parts):
            raise ValueError(
                f"reward_weights names {sorted(weights)}: give one weight per name of reward_parts"
            )
        weights = [weights[name] for name in parts]

    if len(weights) != len(parts) or not all(
        -MAX_MAGNITUDE <= weight <= MAX_MAGNITUDE for weight in weights
    ):
        raise ValueError(
            f"reward_weights is {list(weights)}: give {len(parts)} finite numbers, one per reward"
        )

    return tuple(float(weight) for weight in weights)
