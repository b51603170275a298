"""Writes versions of a model's weights as folders in Hugging Face's format, for a server that reads
them from the disk.

Invariant: a folder is complete before it gets its name. It has the whole model, with untrained
weights included and adapters merged into their base, so the server need not know which weights were
trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentevo.errors import ConfigError
from agentevo.inference.engine import Weights
from agentevo.models.compute.adapters import is_adapted
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.models.files.save import no_progress_bars
from agentevo.runtime.files import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BASE = ".base_layer."


def check_writable(model: PreTrainedModel) -> None:
    """Raises ConfigError for a model whose adapters can't be merged here."""
    if not is_adapted(model):
        return

    for name, module in model.named_modules():
        layer: Any = module
        if not hasattr(layer, "lora_A"):
            continue

        plain = type(layer.base_layer).__mro__[-3:] and isinstance(
            layer.base_layer, torch.nn.Linear
        )
        names = list(layer.lora_A)
        if not plain or len(names) != 1 or layer.lora_variant or layer.fan_in_fan_out:
            raise ConfigError(
                f"engine.type=sglang: {name} is not one plain LoRA adapter around a linear layer, "
                "so it can't be merged: use engine.type=torch, or train all weights"
            )


@own_torch_state()
@torch.no_grad()
def write_version(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: Weights,
    folder: Path,
) -> Path:
    """Writes the model with these weights in place of its own, and returns the folder."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    state |= dict(weights)
    plain: Any = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]

    if is_adapted(model):
        state = _merge_adapters(model, state)

    with atomic_folder(folder) as staging, no_progress_bars():
        plain.save_pretrained(
            staging, state_dict={name: tensor.contiguous() for name, tensor in state.items()}
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)

    return folder


def _merge_adapters(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Computes W + scale B A for every adapted layer, under the names of the plain model."""
    merged = {}
    for name, tensor in state.items():
        if ".lora_" not in name:
            merged[name.removeprefix("base_model.model.").replace(_BASE, ".")] = tensor

    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue

        adapter = next(iter(module.lora_A))
        down = state[f"{name}.lora_A.{adapter}.weight"].float()
        up = state[f"{name}.lora_B.{adapter}.weight"].float()
        target = f"{name.removeprefix('base_model.model.')}.weight"
        base = merged[target]
        merged[target] = (base.float() + module.scaling[adapter] * (up @ down)).to(base.dtype)

    return merged
