"""Compiles decoder layers with PyTorch's compiler, which fuses them into fewer kernels, for
training on a GPU.

In addition to its matrix products, a transformers decoder layer reads and writes its hidden states
some thirty times: norms in float32, rotations, the gate. In a compiled layer, a sequence of such
operations is one kernel. The backward pass recomputes the results within its own kernels, so fewer
tensors stay in memory. Attention is not compiled: the plan (`attention.py`) computes it between two
compiled parts.

One compilation serves all layers of a type and any number of tokens. The engine's passes are not
compiled, because their plans and shapes change with every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentevo.models.compute.linear import PackedWeights
from agentevo.models.vision.parts import language_modules


class CompiledLayer(PackedWeights):
    """Replaces the `forward` of one decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the layer's own `forward`, compiled if gradients are possible."""
        forward: Callable[..., Any] = type(self.layer).forward
        if not torch.is_inference_mode_enabled():
            forward = _compile_forward(forward)
        return forward(self.layer, *args, **kwargs)

    def drop(self) -> None:
        """See PackedWeights.drop. Does nothing: this layer packs nothing."""


def compile_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces the `forward` of every decoder layer of a model after `prepare` by a
    `CompiledLayer`, in place. Parameters and their names do not change. Layers with experts are not
    compiled, because the tokens of an expert depend on data that the compiler can't see. Call this
    before `keep_activations`."""
    for layer in language_modules(model):
        if isinstance(layer, GradientCheckpointingLayer) and not _has_experts(layer):
            layer.forward = CompiledLayer(layer)
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether any layer is compiled."""
    return any(
        isinstance(getattr(forward, "inner", forward), CompiledLayer)
        for forward in (vars(module).get("forward") for module in model.modules())
    )


def _has_experts(layer: nn.Module) -> bool:
    return any(parameter.dim() > 2 for parameter in layer.parameters())


@cache
def _compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled_forward: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return compiled_forward
