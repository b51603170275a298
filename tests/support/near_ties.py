"""Mixtures whose routers choose between experts that are almost equally good: by less than the
rounding of half precision, so that two ways to compute one model choose differently."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.models.compute.routers import enable_routing

GAP = 1e-6
ROUTER_WEIGHTS = ("gate.weight", "router.weight", "gate.classifier.weight")


def nudged(model: PreTrainedModel, sign: float) -> PreTrainedModel:
    """A copy whose routers score expert 1 as expert 0, but for GAP one way or the other."""
    twin = copy.deepcopy(model)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if name.endswith(ROUTER_WEIGHTS):
                noise = torch.randn(weight.shape[1], generator=draws)
                weight[1] = weight[0] + sign * GAP * noise.to(weight.dtype)

    return twin


def two_ways(prepared: PreTrainedModel) -> tuple[Any, Any]:
    """An engine's model and a trainer's, the same but for their near ties."""
    model = enable_routing(copy.deepcopy(prepared))
    return nudged(model, 1.0), nudged(model, -1.0)
