"""Samples with images as the trainer packs them, beside transformers' pass of each alone."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch
from seeing import FILES, Seeing, gradient_difference

from agentevo.models.token_rows import token_logits
from agentevo.models.vision.processor import VisionPrompt
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample
from agentevo.types.images import ImageFile

CPU = torch.device("cpu")
BY_DIGEST = {file.part.sha256: file for file in FILES}
TRAINED = 10
"""The trained tokens of a sample: its last ones."""


class PackedComparison(NamedTuple):
    """A packed batch beside its samples alone."""

    batch: PackedBatch
    difference: float
    """The largest difference of a log-prob, in nats."""
    gradient_difference: float
    """The largest |g - e| / |e| of `Seeing.watched`."""


def sample_of(seeing: Seeing, name: str, *parts: str | ImageFile) -> tuple[Sample, VisionPrompt]:
    """A sample that is trained at its last tokens, and its tokens."""
    prompt = seeing.prompt(*parts)
    mask = np.arange(len(prompt.ids)) >= len(prompt.ids) - TRAINED
    sample = msgspec.structs.replace(
        Sample.given(name, "g", prompt.ids, mask),
        images=prompt.spans,
        processor=seeing.processor.fingerprint if prompt.spans else "",
    )
    return sample, prompt


def branches(seeing: Seeing) -> tuple[list[Sample], list[VisionPrompt]]:
    """A beginning with an image that three samples share. Two of them see different images after
    it, and one sees the first image again."""
    beginning = ("look ", FILES[0], " closely. ")
    told = (
        sample_of(seeing, "a", *beginning, "yes", FILES[1], "and this one?"),
        sample_of(seeing, "b", *beginning, "yes", FILES[2], "and this one?"),
        sample_of(seeing, "c", *beginning, "no", FILES[0], "once again, and again"),
        sample_of(seeing, "d", "only a text, without images"),
    )
    return [sample for sample, _ in told], [prompt for _, prompt in told]


def provider_of(seeing: Seeing) -> ImageProvider:
    provider = ImageProvider.of(seeing.loaded.model)
    assert provider is not None
    provider.hold(BY_DIGEST)
    return provider


def own_logprobs(seeing: Seeing, prompt: VisionPrompt) -> torch.Tensor:
    """The log-probs of a sample's trained tokens, by transformers alone."""
    if seeing.plain.config.model_type.startswith("qwen"):
        seeing.plain.model.rope_deltas = None
    logits = token_logits(seeing.loaded.model, seeing.plain_logits(prompt)).log_softmax(-1)
    places = torch.arange(len(prompt.ids) - TRAINED, len(prompt.ids))
    return logits[places - 1, torch.tensor(prompt.ids)[places]]


def compare_packed(
    seeing: Seeing, samples: list[Sample], prompts: list[VisionPrompt], *, merge: bool
) -> PackedComparison:
    """Log-probs and gradients of the packed samples, beside those of each sample alone."""
    batch = pack(samples, CPU, merge=merge, images=provider_of(seeing))
    logp = token_logprobs(seeing.loaded.model, batch)[0]
    alone = [own_logprobs(seeing, prompt) for prompt in prompts]
    weights = torch.linspace(-1, 1, TRAINED)
    loss = (logp * weights[batch.places]).sum()
    expected_loss = torch.stack([(row * weights).sum() for row in alone]).sum()
    gradients = torch.autograd.grad(loss, seeing.watched(seeing.loaded.model))
    expected = torch.autograd.grad(expected_loss, seeing.watched(seeing.plain))
    return PackedComparison(
        batch, _difference(batch, logp, alone), gradient_difference(gradients, expected)
    )


@torch.no_grad()
def packed_difference(seeing: Seeing, samples: list[Sample], prompts: list[VisionPrompt]) -> float:
    """The difference of `compare_packed` without gradients."""
    batch = pack(samples, CPU, images=provider_of(seeing))
    logp = token_logprobs(seeing.loaded.model, batch)[0]
    return _difference(batch, logp, [own_logprobs(seeing, prompt) for prompt in prompts])


def _difference(batch: PackedBatch, logp: torch.Tensor, alone: list[torch.Tensor]) -> float:
    return max(
        float((logp[batch.samples == number] - row).detach().abs().max())
        for number, row in enumerate(alone)
    )
