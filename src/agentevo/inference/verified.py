"""The first phase of publishing: new weights as the engine will hold them, every one checked,
before the engine's own change.

Invariant: copying `VerifiedWeights` into the model that they were verified for can't fail halfway:
names, shapes, device and dtype are its own, and every number is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentevo.errors import EngineError


@dataclass(frozen=True, eq=False)
class VerifiedWeights:
    """What `verify_weights` found in order."""

    model: PreTrainedModel
    """The one that they fit."""
    tensors: Mapping[str, torch.Tensor]
    """By name of the parameter, on its device and of its dtype."""

    @torch.no_grad()
    def swap_in(self) -> None:
        """The second phase: the model computes with them from now on."""
        own = dict(self.model.named_parameters())
        for name, tensor in self.tensors.items():
            own[name].copy_(tensor)


def verify_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> VerifiedWeights:
    """Raises EngineError for weights that the model can't take over: unknown or missing names,
    other shapes, numbers that are not finite (also after rounding to the model's dtype). Parameters
    that are not trained may be missing. Changes nothing; any thread may call it."""
    own = dict(model.named_parameters())
    unknown = sorted(set(weights) - set(own))
    missing = sorted(
        {name for name, parameter in own.items() if parameter.requires_grad} - set(weights)
    )
    if unknown or missing:
        raise EngineError(
            f"weights refused, nothing changed: unknown {unknown[:3]}, missing {missing[:3]}: "
            "publish the model's own parameter names"
        )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"weights refused, nothing changed: {name} has shape {tuple(tensor.shape)}, the "
                f"engine {tuple(own[name].shape)}"
            )
        found[name] = tensor.detach().to(own[name])
        if not torch.isfinite(found[name]).all():
            raise EngineError(f"weights refused, nothing changed: {name} holds NaN or infinity")
    return VerifiedWeights(model, found)
