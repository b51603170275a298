"""Features of images: what the model reads in place of the embeddings of feature tokens.

Tower and projector run once for an image, here, and not within the model's own forward pass. The
pass gets the features as `mm_encoder_outputs`, an argument of transformers' models, and the model's
own code puts them into the embeddings. This keeps what further levels add in later layers
(Qwen3-VL's DeepStack) and what a model derives from the ids (Gemma 4's embeddings per layer), which
`inputs_embeds` would lose.

A pass gets one row of features for each of its feature tokens, in their order, row by row. So an
image that several sequences share is encoded once, and a pass may end inside an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.parts import processor_of, vision_parameters
from agentevo.models.vision.processor import ProcessedImage, VisionProcessor

ARGUMENT = "mm_encoder_outputs"
"""The argument of a model's `forward` for features."""
_TYPE_ARGUMENTS = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
"""Type of a model -> the argument that says which tokens are an image's. Tokens of one image see
each other in both directions in these models."""


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of consecutive feature tokens of one image."""

    pooled: torch.Tensor
    """[F, D]: what the decoder reads as embeddings."""
    levels: tuple[torch.Tensor, ...] = ()
    """[F, D] each: what the decoder's first layers add (DeepStack)."""
    is_stacked: bool = False
    """Whether the model's class reads one tensor, and not a list with a tensor per image."""

    def rows(self, start: int, stop: int) -> ImageFeatures:
        """Those of the tokens from `start` to before `stop`."""
        levels = tuple(level[start:stop] for level in self.levels)
        return ImageFeatures(self.pooled[start:stop], levels, self.is_stacked)

    def detach(self) -> ImageFeatures:
        """The same numbers without gradient."""
        levels = tuple(level.detach() for level in self.levels)
        return ImageFeatures(self.pooled.detach(), levels, self.is_stacked)


@dataclass(frozen=True, eq=False)
class _EncoderOutput:
    """What the classes of transformers read of a tower's result."""

    pooler_output: Any
    deepstack_features: Any = None


class ImageEncoder:
    """The tower and the projector of a model."""

    def __init__(self, model: PreTrainedModel, processor: VisionProcessor) -> None:
        """`model`: with or without adapters, and prepared or not."""
        self._model = model
        self._processor = processor

    def encode(self, images: Sequence[ProcessedImage]) -> list[ImageFeatures]:
        """The features of each image, in one pass of the tower. They have a gradient if gradients
        are enabled and the tower or the projector is trained. Raises ModelError if the model gives
        another number of features than the image has tokens."""
        if not images:
            return []

        device = next(self._model.parameters()).device
        inputs = {name: t.to(device) for name, t in self._processor.join(images).items()}
        inner = causal_model(self._model).model
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            output = inner.get_image_features(**inputs, return_dict=True)

        pooled = _as_rows(output.pooler_output)
        levels = [_as_rows(level) for level in getattr(output, "deepstack_features", None) or ()]
        counts = [self._processor.count_features(image) for image in images]
        if len(pooled) != sum(counts):
            raise ModelError(
                f"the model gives {len(pooled)} features for {len(images)} images, and the "
                f"processor {sum(counts)} tokens: the image processor does not belong to the model"
            )

        is_stacked = isinstance(output.pooler_output, torch.Tensor)
        return [
            ImageFeatures(pooled[start:stop], tuple(x[start:stop] for x in levels), is_stacked)
            for start, stop in pairwise(accumulate(counts, initial=0))
        ]

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of the tower or of the projector is trained."""
        return any(parameter.requires_grad for _, parameter in vision_parameters(self._model))


def encoder_outputs(features: Sequence[ImageFeatures]) -> dict[str, Any]:
    """The argument of the model's `forward` for the features of all feature tokens of a pass, row
    by row. Empty if there are none."""
    if not features:
        return {}

    pooled = torch.cat([part.pooled for part in features])
    levels = [torch.cat(level) for level in zip(*(f.levels for f in features), strict=True)]
    output = _EncoderOutput(
        # One feature per block: SmolVLM counts whole blocks in each row of a pass.
        pooled.unsqueeze(1) if features[0].is_stacked else (pooled,),
        [(level,) for level in levels] or None,
    )
    return {ARGUMENT: {"image": output}}


def image_arguments(
    model: PreTrainedModel, input_ids: torch.Tensor, features: Sequence[ImageFeatures]
) -> dict[str, Any]:
    """`encoder_outputs` for a pass over `input_ids`. Raises ModelError if the ids have another
    number of feature tokens: some classes would leave features out, and every class would read a
    feature token without feature as an ordinary token."""
    processor = processor_of(model)
    if processor is None:
        if features:
            raise ModelError(
                f"{type(causal_model(model)).__name__} reads no images: choose a model with a "
                "vision tower"
            )
        return {}

    num_tokens = int((input_ids == processor.feature_id).sum())
    num_features = sum(len(part.pooled) for part in features)
    if num_tokens != num_features:
        raise ModelError(
            f"a pass has {num_tokens} feature tokens ({processor.family.feature}) and "
            f"{num_features} features: give those of every image"
        )
    return encoder_outputs(features)


def type_ids(model: PreTrainedModel, types: torch.Tensor) -> dict[str, torch.Tensor]:
    """The argument of the model's `forward` for the types [B, L] int64 of tokens: 1 for a feature
    token, otherwise 0. If the pass continues from a state, L counts the tokens of the state too.
    Empty for models whose tokens see no later ones."""
    name = _TYPE_ARGUMENTS.get(causal_model(model).config.model_type)
    return {} if name is None else {name: types}


def needs_types(model: PreTrainedModel) -> bool:
    """Whether a pass with features needs the types of its tokens."""
    return causal_model(model).config.model_type in _TYPE_ARGUMENTS


def pixel_arguments(
    model: PreTrainedModel, input_ids: torch.Tensor, images: Sequence[ProcessedImage]
) -> dict[str, torch.Tensor]:
    """The arguments with which transformers' own `forward` reads `input_ids` [B, L] with their
    images, from pixels and with positions of its own. `images`: in the order of the feature tokens,
    row by row. Empty for a model that reads no images."""
    processor = processor_of(model)
    if processor is None:
        return {}

    model_type = causal_model(model).config.model_type
    name = "mm_token_type_ids" if model_type.startswith("qwen") else _TYPE_ARGUMENTS.get(model_type)
    types = {name: (input_ids == processor.feature_id).long()} if name else {}
    pixels = {key: tensor.to(input_ids.device) for key, tensor in processor.join(images).items()}
    return {**pixels, **types}


def position_ids(positions: torch.Tensor) -> torch.Tensor:
    """The argument of the model's `forward` for positions [A, B, L] int64: [3, B, L] for M-RoPE,
    and [B, L] for models whose positions have one axis."""
    return positions[0] if len(positions) == 1 else positions


def _as_rows(features: Any) -> torch.Tensor:
    """[F, D] of a tensor [..., D], or of a sequence of such tensors."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
