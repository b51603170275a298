"""Decides whether a model's results for a token depend on the other tokens in the pass.

The results do not depend on them, to the last bit, if `models/compute/linear.py` computes every
matrix product, `models/compute/attention.py` computes every activation function, and
attention sums in a fixed order (`inference/embedded/cache_attention.py`). This is the case in
float32 on an x86 CPU, for decoders without experts. Everything else in a decoder layer is computed
number by number, or row by row.
"""

from __future__ import annotations

import torch
from torch import nn

from agentevo.models.compute.fused import FusedLayer
from agentevo.models.compute.linear import FastLinear, available
from agentevo.models.compute.rows import row_settings


def batch_dependence(model: nn.Module) -> str | None:
    """Why the last digits of a token's results can depend on the other tokens in the pass, for a
    `model` after `prepare`. None if they can't."""
    if row_settings(model) is not None:
        return "the model computes rows by transformers' own code (trainer.compute)"
    parameters = list(model.parameters())
    if parameters[0].device.type != "cpu":
        return f"on {parameters[0].device.type} the library chooses kernels by the size of a batch"
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        return "only float32 is summed in one order"
    if not available():
        return "PyTorch's oneDNN does not sum in one order on this processor"

    within = {
        id(part)
        for layer in model.modules()
        if isinstance(fused := vars(layer).get("forward"), FusedLayer) and fused.can_replace_layer
        for part in layer.modules()
    }
    for name, module in model.named_modules():
        is_ordered = isinstance(module, FastLinear | nn.Embedding) or id(module) in within
        if not is_ordered and any(
            parameter.dim() > 1 for parameter in module.parameters(recurse=False)
        ):
            return f"{name} ({type(module).__name__}) has its own way to multiply"

    return None
