"""Advantages by name: how much better each trained token was than expected.

`advantage` checks the inputs, fills in the hyper-parameters from the catalogue and calls one
function of `group_relative` (a number per trajectory) or `returns` (a recursion over tokens or
turns). Invariants: what stands at masked-out places has no influence; results are 0 there; all
statistics are in float64; nothing depends on padding or on the order of rows and groups beyond
rounding; no NaN or infinity comes out (numbers are bounded to +-1e100 inside and to what the dtype
can hold outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from agentevo.algorithms import group_relative, process, returns, turn_tree
from agentevo.algorithms.advantage_inputs import Given, Ids, checked
from agentevo.catalogue import Value, find, resolve
from agentevo.catalogue.advantages import ADVANTAGES

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
    "tree_returns": turn_tree.tree_returns,
    "prime": process.prime,
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
    turn_parents: Tensor | None = None,
    trajectory_ids: Ids | None = None,
    reward_parts: Mapping[str, Tensor] | Tensor | None = None,
    reward_weights: Mapping[str, float] | Sequence[float] | None = None,
    logp: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    process_rewards: Tensor | None = None,
    **hyper: Value,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [S, T] in dtype and on the device of `token_rewards`, without
    gradient, 0 where `mask` is 0.

    token_rewards, values, logp, sum_pi_squared, process_rewards [S, T] floats; mask [S, T] bool or
    0/1, over trained tokens; group_ids S hashables or integers: rows of one task; trajectory_ids
    likewise: rows of one attempt (default: each row is one); turn_ids [S, T] integers: the turn of
    each trained token, increasing along the trajectory; turn_parents [S, T] integers: the turn that
    this one goes on from; baseline_rewards [S]; reward_parts name -> [S], or [K, S]: the
    trajectory's score by each reward, repeated at each of its rows, with reward_weights (default 1)
    by name or in order.

    With several rows to a trajectory its score is the sum over all of them. Recursions run through
    the trajectory in the order of its turns if `turn_ids` are given; without them each row is a
    sequence of its own. Returns are what a critic should learn (recursions) or the advantages
    again. Raises ValueError for a wrong name, hyper-parameter, shape or missing input, and for NaN
    or infinity at a trained place.
    """
    filled = resolve("advantage", ADVANTAGES, name, hyper)
    given = Given(
        token_rewards,
        mask,
        group_ids,
        trajectory_ids,
        values,
        baseline_rewards,
        turn_ids,
        turn_parents,
        reward_parts,
        reward_weights,
        logp,
        sum_pi_squared,
        process_rewards,
    )
    for needed in find("advantage", ADVANTAGES, name).needs:
        if getattr(given, needed) is None:
            raise ValueError(
                f"advantage {name} needs {needed}: give it, or choose an estimator that does "
                "without"
            )
    inputs = checked(given)
    if name in SCORES:
        per_row = SCORES[name](inputs, **filled)[inputs.trajectory]
        result = torch.where(inputs.mask, _fitting(per_row, token_rewards)[:, None], 0.0)
        return result, result.clone()
    stream = returns.make_stream(inputs)
    found = RECURSIONS[name](inputs, stream, **filled)
    placed = [
        token_rewards.new_zeros(mask.numel()).index_copy_(
            0, stream.index, _fitting(part, token_rewards)
        )
        for part in found
    ]
    return placed[0].view(mask.shape), placed[1].view(mask.shape)


def _fitting(values: Tensor, like: Tensor) -> Tensor:
    limit = torch.finfo(like.dtype).max
    return values.clamp(-limit, limit).to(like.dtype)
