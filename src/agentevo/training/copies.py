"""Copies, in the CPU's memory, of what is saved while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from agentevo.models.parts import Part


def copied_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied ones stay one tensor, which a model's folder has once."""
    made: dict[tuple[int, torch.Size], torch.Tensor] = {}
    found = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor), tensor.shape)
        if key not in made:
            made[key] = _copied(tensor)
        found[name] = made[key]

    return found


def copied_state(state: Any) -> Any:
    """A trainer's state, of which later steps change nothing."""
    if isinstance(state, torch.Tensor):
        return _copied(state)
    if isinstance(state, Part):
        return state.copied()
    if isinstance(state, dict):
        return {key: copied_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied_state(value) for value in state]
    return copy.deepcopy(state)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return copy.deepcopy(tensor.detach())  # of 8 bits, say, which knows how it is copied
    return tensor.detach().to("cpu", copy=True)
