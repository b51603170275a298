"""Tiny models that see, whose log-probs vary, and transformers' own passes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny_vision import tiny_vision
from transformers import AutoModelForImageTextToText, PreTrainedModel

from agentevo.models.vision.parts import set_processor
from agentevo.models.vision.processor import VisionProcessor


class SeeingModel(NamedTuple):
    model: PreTrainedModel
    """In float32, with the attention of transformers."""
    processor: VisionProcessor


def seeing_model(name: str) -> SeeingModel:
    """A model of this type with random weights, and its processor."""
    parts = tiny_vision(name)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(parts.config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # transformers' 0.02 leaves log-probs nearly equal
        if parameter.dim() > 1:
            scale = parameter[0].numel() ** -0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    embeddings = model.get_input_embeddings().weight
    size = 0.1 if name.startswith("gemma") else 0.5
    embeddings.data = size * torch.randn(embeddings.shape, generator=generator)

    processor = VisionProcessor(parts.tokenizer, parts.image_processor, parts.config)
    set_processor(model, processor)
    return SeeingModel(model.eval(), processor)


def own_logits(seeing: SeeingModel, ids: list[int], images: list[Any]) -> torch.Tensor:
    """The logits [T, V] of transformers' own pass over one sequence, which makes masks and
    positions itself. `images`: those of the sequence, processed."""
    model: Any = seeing.model
    row = torch.tensor([ids])
    types = (row == seeing.processor.feature_id).long()
    inputs: dict[str, Any] = seeing.processor.join(images)
    if seeing.processor.family.name == "gemma3":
        inputs["token_type_ids"] = types
    elif seeing.processor.family.name in ("gemma4", "qwen"):
        inputs["mm_token_type_ids"] = types
    if seeing.processor.family.name == "qwen":
        model.model.rope_deltas = None
    logits: torch.Tensor = model(input_ids=row, use_cache=False, **inputs).logits[0]
    return logits
