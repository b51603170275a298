"""What the engine's tests share: requests in company, and the log-probs that a full forward pass
gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from agentevo.inference.torch_engine import TorchEngine
from agentevo.types import Completion, SamplingParams


def _complete(
    engine: TorchEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    async def together() -> list[Completion]:
        requests = (
            engine.generate(prompt, one, deadline_s=120)
            for prompt, one in zip(prompts, params, strict=True)
        )
        return list(await asyncio.gather(*requests))

    return asyncio.run(together())


def _distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [V] after temperature, then top-k, top-p and min-p, each renormalised; token by
    token, in float64."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    probs = weights / weights.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(probs[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += probs[token] / total
    kept = [token for token in kept if probs[token] >= params.min_p * probs[kept[0]]]
    found = np.zeros_like(probs)
    found[kept] = probs[kept] / probs[kept].sum()
    return found


def _difference(
    logits: torch.Tensor, prompt: list[int], completion: Completion, params: SamplingParams
) -> float:
    """Largest distance of the completion's log-probs from those that the whole sequence's logits
    [n, V] give."""
    if params.temperature == 0:
        greedy = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert completion.ids == greedy
        return float(np.abs(completion.logprobs).max())
    rows = logits[len(prompt) - 1 : -1].double().numpy()
    wanted = [
        np.log(_distribution(row, params)[token])
        for row, token in zip(rows, completion.ids, strict=True)
    ]
    return float(np.abs(np.array(wanted) - completion.logprobs).max())


@pytest.fixture(scope="session")
def complete() -> Callable[
    [TorchEngine, Sequence[list[int]], Sequence[SamplingParams]], list[Completion]
]:
    """All requests at once, in an event loop of their own."""
    return _complete


@pytest.fixture(scope="session")
def distribution() -> Callable[[np.ndarray, SamplingParams], np.ndarray]:
    return _distribution


@pytest.fixture(scope="session")
def difference() -> Callable[[torch.Tensor, list[int], Completion, SamplingParams], float]:
    return _difference
