"""Rewards that take the length of an answer into account. No torch; one entry per trajectory,
lengths in trained tokens.

Each function returns the new rewards, which the advantages use; filters use the rewards as they
were earned.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def soft_overlong(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    max_length: int,
    buffer: int,
    penalty: float = 1.0,
) -> list[float]:
    """r + penalty * p(n): p = 0 up to max_length - buffer, then linearly down to -1 at max_length,
    and -1 beyond.

    Source: DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13 (penalty 1, max_length 20480,
    buffer 4096).
    """
    begin = max_length - buffer
    return [
        reward - penalty * min(max((length - begin) / buffer, 0.0), 1.0)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def linear_length(
    rewards: Sequence[float], lengths: Sequence[int], *, per_token: float
) -> list[float]:
    """r - per_token * n."""
    return [reward - per_token * length for reward, length in zip(rewards, lengths, strict=True)]


def cosine_length(
    lengths: Sequence[int],
    successes: Sequence[bool],
    *,
    max_length: int,
    success_short: float = 2.0,
    success_long: float = 1.0,
    failure_short: float = -10.0,
    failure_long: float = 0.0,
    exceeded: float = -10.0,
) -> list[float]:
    """Replaces the reward: from `*_short` at length 0 along half a cosine to `*_long` at
    max_length; `exceeded` from max_length on.

    long + (short - long) (1 + cos(pi n / max_length)) / 2 with the values of success or failure.
    Source: arXiv 2502.03373, section 4.2 with its default values. Its text calls CosFn(t, T, min,
    max) with the short answer's value as `min`, which would reverse the curve; this is the curve
    that it describes and draws.
    """
    shaped = []
    for length, success in zip(lengths, successes, strict=True):
        short, long = (success_short, success_long) if success else (failure_short, failure_long)
        value = long + (short - long) * 0.5 * (1.0 + math.cos(math.pi * length / max_length))
        shaped.append(exceeded if length >= max_length else value)

    return shaped


def relative_length(
    rewards: Sequence[float],
    lengths: Sequence[int],
    successes: Sequence[bool],
    group_ids: Sequence[Hashable],
    *,
    weight: float = 1.0,
) -> list[float]:
    """r + weight * l, with l = 1/2 - (n - shortest)/(longest - shortest) for a success and min(0,
    that) for a failure.

    Shortest and longest are those of the whole group, failures included; where they are equal (also
    in a group of one) l = 0. Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3 (which leaves the
    weight open and warms it up from 0).
    """
    bounds: dict[Hashable, tuple[int, int]] = {}
    for group, length in zip(group_ids, lengths, strict=True):
        shortest, longest = bounds.get(group, (length, length))
        bounds[group] = (min(shortest, length), max(longest, length))

    shaped = []
    for reward, length, success, group in zip(rewards, lengths, successes, group_ids, strict=True):
        shortest, longest = bounds[group]
        bonus = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
        shaped.append(reward + weight * (bonus if success else min(0.0, bonus)))

    return shaped
