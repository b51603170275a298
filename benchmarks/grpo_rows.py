"""What a GRPO step trains on, without generation: ids drawn at random, advantages, and log-probs
near those of the weights at hand.

Ids are uniform over the vocabulary, so nothing is shared but what is meant to be; speed does not
depend on which ids they are. Advantages are standard normal, one per row, not centred within the
group, so that the loss is far from 0 and can be compared. Old log-probs are those of the weights
plus normal noise of 0.1 nats: ratios differ from 1, and some are clipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.training.batching.passes import token_tables
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample

FIRST_ID = 32
"""Ids below are special in many vocabularies."""
NOISE = 0.1
PASS_TOKENS = 16384


@dataclass(frozen=True)
class Row:
    """One prompt with one completion."""

    prompt: list[int]
    completion: list[int]
    advantage: float
    old_logprobs: list[float]
    """One per completion token."""

    def sample(self, name: str) -> Sample:
        before = [0.0] * len(self.prompt)
        return Sample(
            trajectory_id=name,
            group_id="group",
            ids=self.prompt + self.completion,
            loss_mask=[False] * len(self.prompt) + [True] * len(self.completion),
            logprobs=before + self.old_logprobs,
            versions=[-1] * len(self.prompt) + [0] * len(self.completion),
            advantages=[self.advantage] * len(self.completion),
        )

    def json(self) -> dict[str, Any]:
        return asdict(self)


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    return [row.sample(f"row-{number}") for number, row in enumerate(rows)]


def random_ids(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocabulary) for _ in range(count)]


def log_normal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    """A length."""
    return min(high, max(low, round(rng.lognormvariate(math.log(median), sigma))))


def noisy_logprobs(
    model: PreTrainedModel, samples: Sequence[Sample], seed: int
) -> list[list[float]]:
    """Per sample, of its trained tokens: as the module says."""
    rng = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    table = token_tables(
        samples, PASS_TOKENS, device, lambda batch: {"logp": token_logprobs(model, batch)[0]}
    )["logp"]
    table = table + NOISE * torch.randn(table.shape, generator=rng)
    return [table[index, : sample.num_trained].tolist() for index, sample in enumerate(samples)]


def finished(
    model: PreTrainedModel, texts: Sequence[tuple[list[int], list[int]]], seed: int
) -> list[Row]:
    """Rows of (prompt, completion) under the model's weights."""
    rng = random.Random(seed)
    rows = [
        Row(prompt, completion, rng.gauss(0.0, 1.0), [0.0] * len(completion))
        for prompt, completion in texts
    ]
    found = noisy_logprobs(model, samples_of(rows), seed)
    return [replace(row, old_logprobs=logprobs) for row, logprobs in zip(rows, found, strict=True)]


def shared_rows(model: PreTrainedModel, seed: int = 1) -> list[Row]:
    """A group of 8 as an agent's turn makes it: a prompt of 1,000 tokens (system prompt, tools,
    history), answers of 16 to 64, uniform."""
    rng = random.Random(seed)
    vocabulary = model.config.vocab_size
    prompt = random_ids(rng, vocabulary, 1000)
    return finished(
        model, [(prompt, random_ids(rng, vocabulary, rng.randint(16, 64))) for _ in range(8)], seed
    )


def unshared_rows(model: PreTrainedModel, seed: int = 2) -> list[Row]:
    """8 rows that share nothing. Log-normal lengths: prompts of median 150 (sigma 0.6, within
    32..1024), completions of median 80 (sigma 0.7, within 16..512)."""
    rng = random.Random(seed)
    vocabulary = model.config.vocab_size
    lengths = [
        (log_normal(rng, 150, 0.6, 32, 1024), log_normal(rng, 80, 0.7, 16, 512)) for _ in range(8)
    ]
    texts = [
        (random_ids(rng, vocabulary, prompt), random_ids(rng, vocabulary, completion))
        for prompt, completion in lengths
    ]
    return finished(model, texts, seed)


def long_rows(model: PreTrainedModel, seed: int = 3) -> list[Row]:
    """2 rows of 4,096 tokens that share nothing: prompts of 3,072, completions of 1,024."""
    rng = random.Random(seed)
    vocabulary = model.config.vocab_size
    return finished(
        model,
        [(random_ids(rng, vocabulary, 3072), random_ids(rng, vocabulary, 1024)) for _ in range(2)],
        seed,
    )
