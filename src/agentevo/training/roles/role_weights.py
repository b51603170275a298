"""Weights of the models other than the policy, as a checkpoint has them: this process's part of
each, where several processes hold them in parts. Any number of processes can read them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from agentevo.models.compute.parts import Saved, WeightPart
from agentevo.training.optimization import Optimization
from agentevo.training.sharding.layouts import ShardLayout, kept, part_of

Layouts = Mapping[torch.nn.Parameter, ShardLayout]


def weights_of(
    parameters: Mapping[str, torch.nn.Parameter], layouts: Layouts = MappingProxyType({})
) -> dict[str, torch.Tensor | WeightPart]:
    """Name -> weight, for a checkpoint; see `kept`."""
    return {
        name: kept(parameter, parameter, layouts.get(parameter))
        for name, parameter in parameters.items()
    }


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Mapping[str, Saved],
    layouts: Layouts = MappingProxyType({}),
) -> None:
    """The inverse of `weights_of`; other names in `weights` are ignored."""
    for name, parameter in parameters.items():
        parameter.copy_(part_of(weights[name], parameter, layouts.get(parameter)))


class TrainedRole:
    """A model with an optimizer of its own, as a checkpoint has it."""

    weights: Mapping[str, torch.nn.Parameter]
    optimization: Optimization

    def state_dict(self) -> dict[str, Any]:
        layouts = self.optimization.layouts
        return {
            "weights": weights_of(self.weights, layouts),
            "optimization": self.optimization.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        load_weights(self.weights, state["weights"], self.optimization.layouts)
        self.optimization.load_state_dict(state["optimization"])
