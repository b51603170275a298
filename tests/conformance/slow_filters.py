"""Filters and length rewards from their definitions, with numpy's own statistics."""

from __future__ import annotations

import math

import numpy as np


def groups(rewards, ids):
    return {
        name: [r for r, g in zip(rewards, ids, strict=True) if g == name]
        for name in dict.fromkeys(ids)
    }


def std(rewards) -> float:
    return float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1)) if len(rewards) > 1 else 0.0


def informative(rewards, ids) -> set:
    return {
        name
        for name, members in groups(rewards, ids).items()
        if any(r != members[0] for r in members)
    }


def rlpr(steps, beta, decay, record_from, start):
    """Per step the set of groups that stay."""
    means = []
    kept = []
    m = None
    for number, (rewards, ids) in enumerate(steps, start=1):
        if number == start:
            m = float(np.mean(means[record_from - 1 : start - 1]))
        elif number > start:
            m = decay * m + (1 - decay) * means[-1]
        spread = {name: std(members) for name, members in groups(rewards, ids).items()}
        means.append(float(np.mean(list(spread.values()))))
        kept.append({name for name, s in spread.items() if m is None or s >= beta * m - 1e-12})

    return kept


def soft_overlong(length, max_length, buffer):
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer
    return -1.0


def cosine(t, total, low, high):
    """CosFn of arXiv 2502.03373 with `high` at t = 0 and `low` at t = total."""
    return low + 0.5 * (high - low) * (1 + math.cos(t * math.pi / total))


def kimi(length, lengths, success):
    if max(lengths) == min(lengths):
        return 0.0
    lam = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
    return lam if success else min(0.0, lam)
