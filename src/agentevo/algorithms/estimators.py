"""Advantages by name: how much better each trained token was than expected.

`advantage` checks the inputs, fills in the hyper-parameters from the catalogue and calls one function of `group_relative` (a number per
trajectory) or `returns` (a recursion over tokens or turns). Invariants: what stands at masked-out places has no influence; results are 0
there; all statistics are in float64; nothing depends on padding or on the order of rows and groups beyond rounding; no NaN or infinity
comes out (numbers are bounded to +-1e100 inside and to what the dtype can hold outside).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from agentevo.algorithms import group_relative, returns
from agentevo.algorithms.group_relative import Members
from agentevo.catalogue import Value, find, resolve
from agentevo.catalogue.advantages import ADVANTAGES

Ids = Sequence[Hashable] | Tensor
BOUND = 1e100
"""Magnitude at which inputs are cut off, so that squares and sums of them are finite in float64."""


@dataclass(frozen=True)
class Inputs:
    """What `advantage` was given, checked: S rows of T tokens, N trajectories. Floats are float64, without gradient, 0 where untrained."""

    mask: Tensor
    """[S, T] bool: trained tokens."""
    rewards: Tensor
    """[S, T]."""
    trajectory: Tensor
    """[S] int64 in 0..N-1, numbered by first row."""
    members: Members
    """Of N trajectories: their groups, and which have trained tokens at all."""
    score: Tensor
    """[N] sum of a trajectory's rewards."""
    length: Tensor
    """[N] float64: its trained tokens."""
    values: Tensor | None
    """[S, T]."""
    baseline_rewards: Tensor | None
    """[S]."""
    turn_ids: Tensor | None
    """[S, T] int64."""
    reward_parts: Tensor | None
    """[K, N]."""
    reward_weights: tuple[float, ...] | None
    """K of them."""
    logp: Tensor | None
    """[S, T]."""
    sum_pi_squared: Tensor | None
    """[S, T]."""

    def trajectory_name(self, index: int) -> str:
        """For messages."""
        return f"the trajectory that begins in row {int((self.trajectory == index).nonzero()[0])}"


SCORES: Mapping[str, Callable[..., Tensor]] = {
    "raw": group_relative.raw,
    "batch_norm": group_relative.batch_norm,
    "grpo": group_relative.grpo,
    "grpo_passk": group_relative.grpo_passk,
    "rloo": group_relative.rloo,
    "opo": group_relative.opo,
    "gpg": group_relative.gpg,
    "maxrl": group_relative.maxrl,
    "gdpo": group_relative.gdpo,
    "reinforce_pp_baseline": group_relative.reinforce_pp_baseline,
}
"""Estimators that give each trajectory one number, (inputs, **hyper) -> [N]."""

RECURSIONS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reinforce_pp": returns.reinforce_pp,
    "remax": returns.remax,
    "gae": returns.gae,
    "turn_gae": returns.turn_gae,
    "bi_level_gae": returns.bi_level_gae,
    "turn_returns": returns.turn_returns,
    "otb": returns.otb,
}
"""Estimators by recursion, (inputs, stream, **hyper) -> advantages [M], returns [M]."""


def advantage(
    name: str,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Ids,
    values: Tensor | None = None,
    baseline_rewards: Tensor | None = None,
    turn_ids: Tensor | None = None,
    trajectory_ids: Ids | None = None,
    reward_parts: Mapping[str, Tensor] | Tensor | None = None,
    reward_weights: Mapping[str, float] | Sequence[float] | None = None,
    logp: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    **hyper: Value,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [S, T] in dtype and on the device of `token_rewards`, without gradient, 0 where `mask` is 0.

    token_rewards, values, logp, sum_pi_squared [S, T] floats; mask [S, T] bool or 0/1, over trained tokens; group_ids S hashables or
    integers: rows of one task; trajectory_ids likewise: rows of one attempt (default: each row is one); turn_ids [S, T] integers: the turn
    of each trained token, increasing along the trajectory; baseline_rewards [S]; reward_parts name -> [S], or [K, S]: the trajectory's
    score by each reward, repeated at each of its rows, with reward_weights (default 1) by name or in order.

    With several rows to a trajectory its score is the sum over all of them. Recursions run through the trajectory in the order of its
    turns if `turn_ids` are given; without them each row is a sequence of its own. Returns are what a critic should learn (recursions) or
    the advantages again. Raises ValueError for a wrong name, hyper-parameter, shape or missing input, and for NaN or infinity at a trained
    place.
    """
    optional: dict[str, object] = {
        "values": values,
        "baseline_rewards": baseline_rewards,
        "turn_ids": turn_ids,
        "reward_parts": reward_parts,
        "logp": logp,
        "sum_pi_squared": sum_pi_squared,
    }
    filled = resolve("advantage", ADVANTAGES, name, hyper)
    for needed in find("advantage", ADVANTAGES, name).needs:
        if optional[needed] is None:
            raise ValueError(f"advantage {name} needs {needed}: give it, or choose an estimator that does without")
    shape = token_rewards.shape
    if len(shape) != 2 or not token_rewards.is_floating_point():
        raise ValueError(f"token_rewards is {token_rewards.dtype} {list(shape)}: give floats of shape [sequences, tokens]")
    trained = _trained(mask, token_rewards)
    trajectory = _numbered("trajectory_ids", range(shape[0]) if trajectory_ids is None else trajectory_ids, token_rewards)
    row_group = _numbered("group_ids", group_ids, token_rewards)
    num = int(trajectory.max()) + 1 if shape[0] else 0
    group = row_group.new_zeros(num).index_copy_(0, trajectory, row_group)
    if bool((group[trajectory] != row_group).any()):
        row = int((group[trajectory] != row_group).nonzero()[0])
        raise ValueError(f"group_ids: the trajectory of row {row} has rows in several groups: give all of its rows one group id")
    tokens = partial(_tokens, like=token_rewards, trained=trained)
    rewards = tokens("token_rewards", token_rewards)
    length = rewards.new_zeros(num).index_add_(0, trajectory, trained.sum(1, dtype=torch.float64))
    counts = length > 0.0
    inputs = Inputs(
        mask=trained,
        rewards=rewards,
        trajectory=trajectory,
        members=Members(group, counts),
        score=rewards.new_zeros(num).index_add_(0, trajectory, rewards.sum(1)),
        length=length,
        values=None if values is None else tokens("values", values),
        baseline_rewards=None if baseline_rewards is None else _per_row("baseline_rewards", baseline_rewards, trained.any(1)),
        turn_ids=None if turn_ids is None else _turns(turn_ids, trained),
        reward_parts=None if reward_parts is None else _parts(reward_parts, trajectory, counts),
        reward_weights=None if reward_parts is None else _weights(reward_weights, reward_parts),
        logp=None if logp is None else tokens("logp", logp),
        sum_pi_squared=None if sum_pi_squared is None else tokens("sum_pi_squared", sum_pi_squared),
    )
    if name in SCORES:
        per_row = SCORES[name](inputs, **filled)[trajectory]
        result = torch.where(trained, _fitting(per_row, token_rewards)[:, None], 0.0)
        return result, result.clone()
    stream = returns.make_stream(inputs)
    found = RECURSIONS[name](inputs, stream, **filled)
    placed = [token_rewards.new_zeros(shape.numel()).index_copy_(0, stream.index, _fitting(part, token_rewards)) for part in found]
    return placed[0].view(shape), placed[1].view(shape)


def _fitting(values: Tensor, like: Tensor) -> Tensor:
    limit = torch.finfo(like.dtype).max
    return values.clamp(-limit, limit).to(like.dtype)


def _trained(mask: Tensor, like: Tensor) -> Tensor:
    if mask.shape != like.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, token_rewards {list(like.shape)}: give both as [sequences, tokens]")
    trained = mask != 0
    if mask.dtype != torch.bool and bool((trained & (mask != 1)).any()):
        raise ValueError("mask has entries other than 0 and 1: give 1 at trained tokens and 0 elsewhere")
    return trained


def _numbered(name: str, ids: Ids | range, like: Tensor) -> Tensor:
    """0, 1, 2, ... by first appearance. [S] int64"""
    if isinstance(ids, Tensor) and (ids.dim() != 1 or ids.is_floating_point()):
        raise ValueError(f"{name} is {ids.dtype} {list(ids.shape)}: give one integer or hashable per row")
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(listed) != len(like):
        raise ValueError(f"{name}: {len(listed)} ids for {len(like)} rows: give one per row of token_rewards")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in listed], dtype=torch.int64, device=like.device)


def _finite(name: str, given: Tensor, counted: Tensor) -> Tensor:
    """`given` as float64, 0 where not `counted` (same shape). Raises ValueError for NaN or infinity where counted."""
    kept = torch.where(counted, given.detach(), 0.0).double()
    if not bool(torch.isfinite(kept).all()):
        place = (~torch.isfinite(kept)).nonzero()[0].tolist()
        raise ValueError(f"{name}: {float(kept[tuple(place)])} at {place}, where a token is trained: mask it out or mend its source")
    return kept.clamp_(-BOUND, BOUND) if given.dtype == torch.float64 else kept


def _tokens(name: str, given: Tensor, *, like: Tensor, trained: Tensor) -> Tensor:
    if given.shape != like.shape:
        raise ValueError(f"{name} has shape {list(given.shape)}, token_rewards {list(like.shape)}: give both as [sequences, tokens]")
    return _finite(name, given, trained)


def _per_row(name: str, given: Tensor, counted: Tensor) -> Tensor:
    if given.shape != counted.shape:
        raise ValueError(f"{name} has shape {list(given.shape)}: give one number per row, [{len(counted)}]")
    return _finite(name, given, counted)


def _turns(turn_ids: Tensor, trained: Tensor) -> Tensor:
    if turn_ids.shape != trained.shape or turn_ids.is_floating_point() or turn_ids.is_complex():
        raise ValueError(
            f"turn_ids is {turn_ids.dtype} {list(turn_ids.shape)}: give the turn of each token, integers {list(trained.shape)}"
        )
    return turn_ids.long()


def _parts(parts: Mapping[str, Tensor] | Tensor, trajectory: Tensor, counts: Tensor) -> Tensor:
    """[K, N]. Raises ValueError unless all rows of a trajectory have the same scores."""
    named = parts.items() if isinstance(parts, Mapping) else [(f"[{index}]", part) for index, part in enumerate(parts)]
    found = []
    for name, part in named:
        row_scores = _per_row(f"reward_parts {name}", part, counts[trajectory])
        scores = row_scores.new_zeros(len(counts)).index_copy_(0, trajectory, row_scores)
        if bool((scores[trajectory] != row_scores).any()):
            row = int((scores[trajectory] != row_scores).nonzero()[0])
            raise ValueError(f"reward_parts {name}: the trajectory of row {row} has different scores: repeat its score at each of its rows")
        found.append(scores)
    if not found:
        raise ValueError("reward_parts is empty: give at least one reward")
    return torch.stack(found)


def _weights(weights: Mapping[str, float] | Sequence[float] | None, parts: Mapping[str, Tensor] | Tensor) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * len(parts)
    if isinstance(weights, Mapping):
        if not isinstance(parts, Mapping) or set(weights) != set(parts):
            raise ValueError(f"reward_weights names {sorted(weights)}: give one weight per name of reward_parts")
        weights = [weights[name] for name in parts]
    if len(weights) != len(parts) or not all(-BOUND <= weight <= BOUND for weight in weights):
        raise ValueError(f"reward_weights is {list(weights)}: give {len(parts)} finite numbers, one per reward")
    return tuple(float(weight) for weight in weights)
