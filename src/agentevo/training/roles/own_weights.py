"""Weights of the models beside the policy, as a checkpoint has them: whole, whatever the processes
that trained them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from agentevo.training.sharding.layouts import Layout, part_of, saved, whole_of

Layouts = Mapping[torch.nn.Parameter, Layout]


def weights_of(
    parameters: Mapping[str, torch.nn.Parameter], layouts: Layouts = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Name -> weight, for a checkpoint; see `saved`. Called by all processes."""
    return {
        name: saved(whole_of(parameter, parameter, layouts.get(parameter)), parameter)
        for name, parameter in parameters.items()
    }


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Mapping[str, torch.Tensor],
    layouts: Layouts = MappingProxyType({}),
) -> None:
    """The inverse of `weights_of`; other names in `weights` are ignored."""
    for name, parameter in parameters.items():
        parameter.copy_(part_of(weights[name], parameter, layouts.get(parameter)))
