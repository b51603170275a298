"""Forward passes over a small tree of tokens, through the fused layers and through the layers' own
forward."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from agentevo.models.compute.fused import FusedLayer
from agentevo.training.kernels.tree_attention import TreeAttention
from agentevo.training.tree import build_tree

TREE = build_tree([[5, 9, 60, 3, 41, 8], [5, 9, 60, 3, 7], [5, 11, 12]])


def outputs(model: nn.Module, **asked: Any) -> Any:
    """What the model gives for the nodes of the tree."""
    given = {"input_ids": torch.as_tensor(TREE.ids)[None]} | asked
    positions = torch.as_tensor(TREE.positions)[None]
    plan = TreeAttention(TREE, torch.device("cpu"))
    return model(position_ids=positions, use_cache=False, plan=plan, **given)


def logits(model: nn.Module) -> torch.Tensor:
    """[1, N, V] of the nodes of the tree."""
    return outputs(model).logits


def unfused(model: nn.Module) -> torch.Tensor:
    """The logits through the own forward of layers or PEFT, which runs where gradients are kept."""
    return logits(model).detach()


def fused(model: nn.Module) -> torch.Tensor:
    """The logits through the fused layers, where there are any."""
    with torch.no_grad():
        return logits(model)


def num_fused_calls(model: nn.Module) -> int:
    """How often a forward pass without gradients goes through the fused code."""
    calls = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls  # a profiler sees the private method without replacing it
        calls += event == "call" and frame.f_code is FusedLayer.of_tokens.__code__

    sys.setprofile(watch)
    try:
        fused(model)
    finally:
        sys.setprofile(None)

    return calls
