"""A second model that starts as a copy of the policy and is then trained, or kept, by itself: a
reference, a critic, a process reward.

What the policy does not train (the base under its adapters) is shared, never copied: beside a
policy with adapters a copy costs another set of adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from agentevo.models.sharded import copy_sharded, is_sharded, like, whole


def copy_policy(policy: PreTrainedModel) -> PreTrainedModel:
    """A copy of the policy as it is now that shares every parameter without gradient."""
    if is_sharded(policy):
        return copy_sharded(policy)
    return copy.deepcopy(policy, {id(p): p for p in policy.parameters() if not p.requires_grad})


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter, for the parameters that need a gradient."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def weights_of(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The copy's own weights, for a checkpoint; see `whole` for a sharded one."""
    return {name: whole(parameter.detach()) for name, parameter in parameters.items()}


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `weights_of`; other names in `weights` are ignored."""
    for name, parameter in parameters.items():
        parameter.copy_(like(weights[name], parameter))
