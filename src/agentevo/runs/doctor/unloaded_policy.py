"""A recipe's model without its weights: every parameter has the shape, the type and the size that
it has in training, on the device `meta`. Only the model's config.json is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from agentevo.config import LoraSection, RunConfig
from agentevo.models.compute.adapters import add_adapter, peft, read_adapter_config
from agentevo.models.compute.attention import prepare
from agentevo.models.config_overrides import model_config
from agentevo.models.files.load import make_hollow
from agentevo.models.files.resolve import fetch_config
from agentevo.runs.orchestration.components import load_policy

PACKED_BYTES = {"8bit": 1.0, "4bit": 1 / 2 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per weight in bitsandbytes. 4-bit weights also have a one-byte scale per 64 weights and a
float32 scale per 256 of these scales (arXiv 2305.14314, section 3)."""


def unloaded_policy(config: RunConfig) -> PreTrainedModel:
    """The policy of a recipe, without weights. A tiny model is created here, with its weights.
    Raises ModelError for a missing model, and MissingExtraError if the recipe has adapters and PEFT
    is not installed."""
    if config.model.name == "tiny":
        return load_policy(config).model

    with tempfile.TemporaryDirectory(prefix="agentevo-config-") as temporary_path:
        folder = fetch_config(config.model.name, Path(temporary_path))
        return shape_policy(config, model_config(folder, config.model.config_overrides))


def shape_policy(config: RunConfig, shape: PretrainedConfig) -> PreTrainedModel:
    """The policy of a recipe whose model has the configuration `shape`. Raises MissingExtraError if
    the recipe has adapters and PEFT is not installed."""
    lora = config.model.lora
    model = make_hollow(config.model, shape)
    if not lora.enabled:
        return prepare(model)

    with torch.device("meta"):
        packed = [] if lora.quantize == "none" else _packed_layers(model)
        adapted = _adapt(model.requires_grad_(False), lora)
        for layer in packed:
            num_bytes = round(layer.weight.numel() * PACKED_BYTES[lora.quantize])
            layer.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8), False)

    return prepare(adapted)


def _packed_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """The layers whose weights transformers stores in 8 or 4 bits: all linear layers except the
    output layer."""
    output = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not output]


def _adapt(model: PreTrainedModel, section: LoraSection) -> PreTrainedModel:
    if section.adapter is None:
        return add_adapter(model, section.model_copy(update={"init": "default"}), seed=0)

    saved = read_adapter_config(section.adapter)
    saved.inference_mode = False
    return peft().get_peft_model(model, saved).eval()
