"""The distribution that a token is drawn from, computed as slowly as it is defined."""

from __future__ import annotations

import numpy as np

from agentevo.types import SamplingParams


def distribution_of(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [V] after temperature, then top-k, top-p and min-p, each renormalised; token by
    token, in float64."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    probs = weights / weights.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k:
        order = order[: params.top_k]

    total = sum(probs[token] for token in order)
    kept = []
    mass = 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += probs[token] / total

    kept = [token for token in kept if probs[token] >= params.min_p * probs[kept[0]]]
    found = np.zeros_like(probs)
    found[kept] = probs[kept] / probs[kept].sum()
    return found


def log_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Its logarithms [V]; at temperature 0 those of a point mass."""
    if params.temperature == 0:
        found = np.full(len(logits), -np.inf)
        found[logits.argmax()] = 0.0
        return found
    with np.errstate(divide="ignore"):
        return np.log(distribution_of(logits, params))
