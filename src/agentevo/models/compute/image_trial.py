"""Checks by a trial pass with images whether AgentEvo computes a vision-language model as
transformers does.

The trial of texts (trial.py) can't see what only images do: tokens of an image that see each other
in both directions, positions on several axes, features that further layers add. So the same is done
with a text that has two images of noise, the second one in the half that continues from a cache.
Without the model's image processor there is no such trial, and a model with a vision tower does not
compute the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.compute.trial import (
    EAGER,
    REMEDY,
    PackedTextsPlan,
    TrialToken,
    evaluating,
    logprob_difference,
    model_name,
    pass_logits,
    run_pass,
    trial_texts,
    trial_tolerance,
)
from agentevo.models.vision.features import (
    ImageEncoder,
    ImageFeatures,
    encoder_outputs,
    position_ids,
    type_ids,
)
from agentevo.models.vision.parts import (
    forget_positions,
    has_tower,
    processor_of,
    reads_text_only,
    remembers_positions,
    set_attention,
)
from agentevo.models.vision.processor import ProcessedImage, VisionProcessor
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import image_file

IMAGE_SIZES = ((48, 64), (64, 48))
"""The width and height of the images, in pixels. The processor scales them."""
TILED = ("idefics3", "internvl")
"""The families that cut an image into tiles of one size. One tile is enough."""
NO_PROCESSOR = "there is no image processor beside the model, so no trial can show an image to it"


@dataclass(frozen=True, eq=False)
class ImageText:
    """A sequence of tokens with images."""

    ids: list[int]
    positions: torch.Tensor
    """[A, L]"""
    types: torch.Tensor
    """[L]: 1 for feature tokens, otherwise 0."""
    images: list[ProcessedImage]
    half: int
    """The number of tokens up to the end of the first image and some text after it."""


def try_out_images(model: PreTrainedModel, implementation: str) -> None:
    """Raises ModelError if AgentEvo's attention, called `implementation`, would compute a model
    with a vision tower differently from transformers, or if this can't be tried. Does nothing for
    other models, models that are shown no images, and models on the device `meta`."""
    if not has_tower(model) or next(model.parameters()).is_meta or reads_text_only(model):
        return
    processor = processor_of(model)
    if processor is None:
        raise ModelError(f"{model_name(model)}: {NO_PROCESSOR}")

    text = trial_image_text(model, processor)
    with evaluating(model):
        try:
            set_attention(model, EAGER)
            reference = own_image_logits(model, processor, text)
            if _looks_ahead(model, processor, text):
                raise ModelError(
                    f"{model_name(model)}: the tokens of an image see each other in both "
                    f"directions, which the tree can't compute: {REMEDY}"
                )
        finally:
            set_attention(model, implementation)
        logits = _packed_logits(model, processor, text)

    assert not remembers_positions(model), "a pass with positions remembers them"
    difference = logprob_difference(logits, reference)
    if not difference <= trial_tolerance(model):
        raise ModelError(
            f"{model_name(model)}: in one row with others, from a cache, a text with images gets "
            f"other log-probs than transformers' own pass gives it alone (by {difference:.2g} of "
            f"their spread): {REMEDY}"
        )


def trial_image_text(model: PreTrainedModel, processor: VisionProcessor) -> ImageText:
    """A short text with an image in each half."""
    first, second = (_noise(processor, number) for number in range(len(IMAGE_SIZES)))
    (*words,), *_ = trial_texts(model)
    ids: list[int] = []
    spans = []
    for text, image in ((words[:5], first), (words[5:12], second)):
        ids += text
        count = processor.count_features(image)
        spans.append(ImageSpan(len(ids), count, image.grid, image.digest))
        ids += [processor.feature_id] * count

    ids += words[12:]
    types = torch.tensor([int(id == processor.feature_id) for id in ids])
    positions = torch.from_numpy(processor.positions(len(ids), spans))
    half = spans[0].offset + spans[0].length + 3
    return ImageText(ids, positions, types, [first, second], half)


def own_image_logits(
    model: PreTrainedModel, processor: VisionProcessor, text: ImageText
) -> torch.Tensor:
    """The logits [L, V] of the text by transformers alone, from pixels, with the model's own
    positions and present attention. Without gradient."""
    return _own_logits(model, text, processor.join(text.images))


def encode_detached(
    model: PreTrainedModel, processor: VisionProcessor, images: Sequence[ProcessedImage]
) -> list[ImageFeatures]:
    """Features without gradient, by a pass in which fast layers keep no packed weights."""
    with torch.enable_grad():
        return [part.detach() for part in ImageEncoder(model, processor).encode(images)]


def _own_logits(model: PreTrainedModel, text: ImageText, images: dict[str, Any]) -> torch.Tensor:
    device = next(model.parameters()).device
    types = text.types[None].to(device)
    arguments = type_ids(model, types)
    if len(text.positions) > 1:  # M-RoPE derives positions from types
        arguments = {"mm_token_type_ids": types}
    try:
        return run_pass(
            model,
            "transformers' own pass with images",
            input_ids=torch.tensor([text.ids], device=device),
            use_cache=False,
            **arguments,
            **{
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in images.items()
            },
        )
    finally:
        forget_positions(model)


def _looks_ahead(model: PreTrainedModel, processor: VisionProcessor, text: ImageText) -> bool:
    """Whether other features at the last token of the first image change what the model predicts
    before it."""
    features = encode_detached(model, processor, text.images)
    pooled = features[0].pooled.clone()
    pooled[-1] = pooled[0] + 1
    changed = [replace(features[0], pooled=pooled), *features[1:]]
    grids = {
        name: value
        for name, value in processor.join(text.images).items()
        if name == "image_grid_thw"
    }
    before = int(text.types[: text.half].nonzero()[-1])
    own, other = (
        _own_logits(model, text, {**grids, **encoder_outputs(parts)})[:before]
        for parts in (features, changed)
    )
    return not logprob_difference(other, own) <= trial_tolerance(model) / 10


def _packed_logits(
    model: PreTrainedModel, processor: VisionProcessor, text: ImageText
) -> torch.Tensor:
    """The logits [L, V] of the text in two passes beside another one. The second pass reads the
    keys of the first one from a cache."""
    features = encode_detached(model, processor, text.images)
    other_ids = trial_texts(model)[1]
    axes = len(text.positions)
    others = torch.arange(len(other_ids)).expand(axes, -1)
    tokens = [TrialToken(0, place, id) for place, id in enumerate(text.ids)]
    beside = [TrialToken(1, place, id) for place, id in enumerate(other_ids)]

    def compute(
        plan: PackedTextsPlan, own: slice, start: int, parts: list[ImageFeatures], *order: Any
    ) -> torch.Tensor:
        positions = torch.cat(order, dim=1)[:, None].to(next(model.parameters()).device)
        rows = list(range(start, start + len(text.ids[own])))
        return pass_logits(
            model,
            plan.tokens,
            plan,
            rows,
            position_ids=position_ids(positions),
            **encoder_outputs(parts),
        )

    first, second = slice(0, text.half), slice(text.half, None)
    plan = PackedTextsPlan([*beside, *tokens[first]])
    later = PackedTextsPlan([*tokens[second], *beside], before=plan)
    beside_first = (others, text.positions[:, first])
    beside_second = (text.positions[:, second], others)
    return torch.cat(
        [
            compute(plan, first, len(beside), features[:1], *beside_first),
            compute(later, second, 0, features[1:], *beside_second),
        ]
    )


def _noise(processor: VisionProcessor, number: int) -> ProcessedImage:
    """An image of noise, of one tile if the family has tiles."""
    width, height = IMAGE_SIZES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    image = processor.process(image_file(file.getvalue(), "image/png"))
    family = processor.family
    if family.name not in TILED:
        return image

    count = family.numbers[0]
    axis = family.image_axis
    tensors = {name: tensor.narrow(axis, 0, 1) for name, tensor in image.tensors.items()}
    return ProcessedImage(image.digest, tensors, family.feature * count, (count,))
