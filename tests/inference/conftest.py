"""What the engine's tests share: requests in company, and the log-probs that a full forward pass
gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from broadcast_member import BUCKET, Mixed
from sampled_distribution import distribution_of

from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.weights import broadcast_group, broadcast_source
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.types import Completion, SamplingParams


def _complete(
    engine: TorchEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    async def together() -> list[Completion]:
        requests = (
            engine.generate(prompt, param, deadline_s=300)
            for prompt, param in zip(prompts, params, strict=True)
        )
        return list(await asyncio.gather(*requests))

    return asyncio.run(together())


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
        np.log(distribution_of(row, params)[token])
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
    return distribution_of


@pytest.fixture(scope="session")
def difference() -> Callable[[torch.Tensor, list[int], Completion, SamplingParams], float]:
    return _difference


@pytest.fixture
def quick_rounds(monkeypatch) -> None:
    """Weights that go over a process group, in small buckets."""
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(broadcast_source, "WAIT_S", 0.5)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of a run's weights."""
    return tmp_path / "weights"


@pytest.fixture
def sender(folder, notes) -> BroadcastSender:
    return BroadcastSender(folder, Mixed(1), note=notes.append)
