"""A model's parameters, divided into trained and frozen ones."""

from __future__ import annotations

import torch


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> detached view of each parameter that requires a gradient. The views share memory with
    the parameters."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter, for all parameters that require a gradient."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
