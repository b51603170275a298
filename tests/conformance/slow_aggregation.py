"""Aggregations as the papers write them: plain loops in float64 over lists of trained tokens."""

from __future__ import annotations

import numpy as np


def trained(values, mask):
    """Per row the values of its trained tokens."""
    return [
        [float(v) for v, m in zip(row, keep, strict=True) if m]
        for row, keep in zip(values, mask, strict=True)
    ]


def aggregate(
    name: str, values: np.ndarray, mask: np.ndarray, trajectory_ids=None, norm: float | None = None
) -> float:
    rows = trained(values, mask)
    filled = [row for row in rows if row]
    if not filled:
        return 0.0
    if name == "token-mean":
        return sum(v for row in filled for v in row) / sum(len(row) for row in filled)
    if name == "seq-mean-token-sum":
        return sum(sum(row) for row in filled) / len(filled)
    if name == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    if name == "seq-mean-token-sum-norm":
        return sum(sum(row) / norm for row in filled) / len(filled)
    assert name == "per-trajectory-token-mean"

    tokens = {}
    for index, row in enumerate(rows):
        tokens.setdefault(index if trajectory_ids is None else trajectory_ids[index], []).extend(
            row
        )

    means = [sum(row) / len(row) for row in tokens.values() if row]
    return sum(means) / len(means)


def value_loss(values, returns, mask, old_values=None, clip=None) -> np.ndarray:
    """0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2) at trained places, else 0."""
    losses = np.zeros(mask.shape)
    for i, j in np.ndindex(*mask.shape):
        if mask[i, j]:
            v = float(values[i, j])
            target = float(returns[i, j])
            terms = [(v - target) ** 2]
            if clip is not None:
                old = float(old_values[i, j])
                terms.append((min(max(v, old - clip), old + clip) - target) ** 2)
            losses[i, j] = 0.5 * max(terms)

    return losses
