"""Models with LoRA adapters that change what the base computes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from agentevo.config import LoraSection
from agentevo.models.compute.adapters import add_adapter


def moved(model: nn.Module, seed: int = 0, by: float = 0.2) -> nn.Module:
    """The model, whose trained weights are moved away from where they start: a fresh adapter's
    B = 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(
    model: PreTrainedModel, section: LoraSection, seed: int = 1, by: float = 0.2
) -> PreTrainedModel:
    """A copy of the model with an adapter that is not at its start."""
    copied = add_adapter(copy.deepcopy(model).requires_grad_(True), section, seed)
    moved(copied, seed, by)
    return copied
