"""A batch with images gives every sample what transformers gives it alone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, png
from vision_models import SeeingModel, own_logits, seeing_model

from agentevo.models.compute.attention import NAME
from agentevo.models.compute.rows import row_settings, use_rows
from agentevo.models.token_rows import causal_model
from agentevo.training.batching import row_groups
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import ImagePart, Message, Sample, TextPart
from agentevo.types.images import ImageFile, image_file

CPU = torch.device("cpu")
FILES = [
    image_file(png(width, height, seed), "image/png")
    for seed, (width, height) in enumerate([(16, 24), (24, 16), (16, 16)])
]
BY_DIGEST = {file.part.sha256: file for file in FILES}
TREE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "internvl", "llava")


def asking(*parts: str | ImageFile) -> Message:
    return Message(
        "user",
        tuple(TextPart(p) if isinstance(p, str) else ImagePart(p.part.sha256) for p in parts),
    )


def sample_of(seeing: SeeingModel, name: str, messages: list[Message], trained: int = 12) -> Sample:
    """A sample of a conversation, trained at its last tokens."""
    prompt = seeing.processor.prompt(messages, BY_DIGEST)
    mask = np.arange(len(prompt.ids)) >= len(prompt.ids) - trained
    sample = Sample.given(name, "g", prompt.ids, mask)
    return msgspec.structs.replace(
        sample,
        images=prompt.spans,
        processor=seeing.processor.fingerprint,
        advantages=np.linspace(-1, 1, trained),
    )


def branches(seeing: SeeingModel) -> list[Sample]:
    """A beginning with an image that three samples share; two of them see different images after
    it, and one sees the first image again."""
    first = asking("look ", FILES[0], " closely")
    return [
        sample_of(seeing, "a", [first, Message("assistant", "yes"), asking(FILES[1], "and this?")]),
        sample_of(seeing, "b", [first, Message("assistant", "yes"), asking(FILES[2], "and this?")]),
        sample_of(seeing, "c", [first, Message("assistant", "no"), asking(FILES[0], "again")]),
        sample_of(seeing, "d", [asking("only a text")]),
    ]


def provider_of(seeing: SeeingModel) -> ImageProvider:
    provider = ImageProvider(seeing.processor, seeing.model.config)
    provider.hold(BY_DIGEST)
    return provider


def own_logprobs(seeing: SeeingModel, samples: list[Sample]) -> list[torch.Tensor]:
    """The log-probs of each sample's trained tokens, by transformers, one sample at a time."""
    provider = provider_of(seeing)
    logprobs = []
    for sample in samples:
        images = [provider[span.digest] for span in sample.images]
        logits = own_logits(seeing, sample.ids.tolist(), images)
        places = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        targets = torch.from_numpy(sample.ids).long()[places]
        logprobs.append(logits.log_softmax(-1)[places - 1, targets])
    return logprobs


def by_sample(batch: PackedBatch, logp: torch.Tensor) -> list[torch.Tensor]:
    return [logp[batch.samples == number] for number in range(len(batch.mask))]


def gradients(model: Any, logprobs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the embeddings, and of the tower's first weight, in a loss that weighs all tokens."""
    loss = torch.stack([(torch.linspace(-1, 1, len(row)) * row).sum() for row in logprobs]).sum()
    tower = next(p for name, p in model.named_parameters() if "vi" in name and p.dim() > 1)
    embeddings = model.get_input_embeddings().weight
    return list(torch.autograd.grad(loss, [embeddings, tower]))


def assert_equal(
    seeing: SeeingModel, model: Any, samples: list[Sample], *, merge: bool
) -> PackedBatch:
    """The batch, in which `model` gives each sample its log-probs and gradients alone."""
    expected = own_logprobs(seeing, samples)
    own_gradients = gradients(seeing.model, expected)
    batch = pack(samples, CPU, merge=merge, images=provider_of(seeing))
    logprobs = by_sample(batch, token_logprobs(model, batch)[0])
    for mine, own in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-4)
    for mine, own in zip(gradients(model, logprobs), own_gradients, strict=True):
        assert float((mine - own).norm() / own.norm()) < 1e-4
    return batch


def some_slow(quick: tuple[str, ...], families: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in families
    ]


@pytest.mark.parametrize("family", some_slow(("qwen2_vl", "idefics3"), TREE_FAMILIES))
@pytest.mark.parametrize("merge", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tree_with_images_is_as_its_samples_alone(family: str, merge: bool) -> None:
    seeing = seeing_model(family)
    samples = branches(seeing)
    model: Any = copy.deepcopy(seeing.model)
    model.set_attn_implementation({"text_config": NAME})
    batch = assert_equal(seeing, model, samples, merge=merge)

    assert batch.images is not None
    assert batch.position_ids.shape == (3 if "qwen" in family else 1, 1, batch.num_distinct)
    assert sorted(batch.images.digests) == sorted(BY_DIGEST), "each image is encoded once"
    longest = max(len(sample.ids) for sample in samples)
    assert (batch.num_distinct < batch.num_logical - longest / 2) == merge


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("family", some_slow(("gemma3", "qwen2_vl"), FAMILIES))
def test_rows_with_images_are_as_their_samples_alone(
    family: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different length share passes, and what several rows begin with is computed once
    where the model's state allows it: not where tokens of an image see each other."""
    if shares and family.startswith("gemma"):
        return

    monkeypatch.setattr(row_groups, "SMALLEST_SAVING", 1)
    seeing = seeing_model(family)
    samples = branches(seeing)
    model: Any = copy.deepcopy(seeing.model)
    use_rows(model, "a test")
    settings = row_settings(model)
    assert settings is not None and settings.pads
    vars(causal_model(model))["_agentevo_rows"] = dataclasses.replace(settings, shares=shares)
    batch = assert_equal(seeing, model, samples, merge=True)
    passes = batch.row_passes(settings.pads, shares=shares)
    groups = list(zip(passes.groups, passes.images, strict=True))
    assert any(group.is_parent and images for group, images in groups) == shares
    assert any(len(group.input_ids) > 1 and images for group, images in groups)
