"""A model's parameters, divided into trained and frozen ones."""

from __future__ import annotations

import torch


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that require a gradient, by name: views, not copies, without gradient."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter, for the parameters that need a gradient."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
