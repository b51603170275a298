"""Computes the single matrix and bias that are equivalent to a linear layer in a pass without
gradients, with or without LoRA adapters around it.

    W' = W + sum_i scale_i B_i A_i                          (LoRA, arXiv 2106.09685)
    W' = m / ||W + scale B A|| (W + scale B A), row by row   (DoRA, arXiv 2402.09353)

The layer itself does not change: W and the adapters are not merged in place. PEFT's layer is
recognised by its name and public attributes, so this module does not import PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agentevo.models.compute.linear import FastLinear


def ingredients(linear: nn.Module | None) -> list[torch.Tensor | float] | None:
    """All tensors and numbers that the layer's product depends on, in a fixed order. None if the
    layer computes more than a product: it has hooks, active dropout, or adapters of other kinds or
    on other layers."""
    if type(linear) is FastLinear:
        parameters = linear._parameters.values()  # faster than lookups by name
        return (
            None
            if _has_hooks(linear)
            else [parameter for parameter in parameters if parameter is not None]
        )

    if not _is_lora(linear):
        return None

    layer: Any = linear
    if (
        type(layer.base_layer) is not FastLinear
        or layer.merged
        or layer.fan_in_fan_out
        or _has_hooks(layer)
        or _has_hooks(layer.base_layer)
    ):
        return None

    base = layer.base_layer
    tensors: list[torch.Tensor | float] = [base.weight]
    tensors += [] if base.bias is None else [base.bias]
    names = active_names(layer)
    for name in names:
        variant = layer.lora_variant.get(name)
        dora = type(variant).__name__ == "DoraLinearVariant"
        dropout = layer.lora_dropout[name]

        if (variant is not None and not (dora and len(names) == 1)) or layer.lora_B[
            name
        ].bias is not None:
            return None

        if not isinstance(dropout, nn.Identity) and (dropout.training or layer.training):
            return None

        tensors += [layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]]
        tensors += [layer.lora_magnitude_vector[name].weight] if dora else []

    return tensors


def effective(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The effective matrix [out, in] and bias [out] (or None), detached, of a layer that has
    `ingredients`."""
    layer: Any = linear
    if type(linear) is FastLinear:
        return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()

    weight, bias = effective(layer.base_layer)
    for name in active_names(layer):
        weight = torch.addmm(
            weight,
            layer.lora_B[name].weight.detach(),
            layer.lora_A[name].weight.detach(),
            alpha=layer.scaling[name],
        )
        if name in layer.lora_variant:
            magnitude = layer.lora_magnitude_vector[name].weight.detach()
            weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)

    return weight, bias


def active_names(layer: Any) -> list[str]:
    """The names of a PEFT layer's active adapters."""
    return (
        []
        if layer.disable_adapters
        else [name for name in layer.active_adapters if name in layer.lora_A]
    )


def _is_lora(linear: nn.Module | None) -> bool:
    return type(linear).__name__ == "Linear" and type(linear).__module__ == "peft.tuners.lora.layer"


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
