"""A process's part of a model that is divided among several, for the code that writes the model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from agentevo.models.compute.adapters import is_adapted
from agentevo.models.compute.parts import WeightPart
from agentevo.models.compute.sharded import skeleton_of
from agentevo.training.sharding.layouts import layouts_by_name


def weight_parts(model: PreTrainedModel, only_trained: bool = False) -> dict[str, WeightPart]:
    """Name -> this process's part of every weight, and of every buffer that is saved, in the dtypes
    that the model has outside of training, as they are now. Tied weights have one name."""
    skeleton = skeleton_of(model)
    layouts = layouts_by_name(model)
    dtypes = {name: parameter.dtype for name, parameter in skeleton.named_parameters()}
    parts = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not only_trained:
            layout = layouts.get(name)
            part = WeightPart.of(parameter, cut=None if layout is None else layout.cut)
            parts[name] = part.to(dtypes.get(name, parameter.dtype))

    if not only_trained:
        parts |= {name: WeightPart.of(buffer) for name, buffer in _saved_buffers(model).items()}

    return parts


def saved_parts(model: PreTrainedModel) -> dict[str, WeightPart]:
    """The weights that a checkpoint has: for a model with adapters only the adapters."""
    return weight_parts(model, only_trained=is_adapted(model))


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
