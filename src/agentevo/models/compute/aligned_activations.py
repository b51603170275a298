"""Activation functions that compute every number by the same instructions, whatever its position.

On a CPU, PyTorch computes functions like SiLU and GELU in vector registers. It computes the
remainder at the end of a tensor, or of a thread's part, by other instructions, whose results differ
in the last digits. A row's numbers would then depend on its position in the batch. `Aligned` pads
with zeros so that there is no remainder.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

VECTORS = 64
"""A multiple of the numbers that one iteration of PyTorch's vector loops computes."""
GRAIN = 32768
"""at::internal::GRAIN_SIZE. PyTorch gives each thread at least this many numbers."""
GELU_GRAIN = 16384
"""GELU on more numbers than this is split among all threads."""


class Aligned:
    """Replaces the `forward` of one activation module in passes without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        function: Any = type(self.module).forward
        if torch.is_grad_enabled() or x.device.type != "cpu" or not x.numel():
            return function(self.module, x)

        rows = x.reshape(-1, x.shape[-1])
        num_rows, width = rows.shape
        padding = -width % VECTORS
        total = _even_rows(num_rows, width + padding, torch.get_num_threads())
        if not padding and total == num_rows:
            return function(self.module, x)

        padded = pad(rows, (0, padding, 0, total - num_rows))
        return function(self.module, padded)[:num_rows, :width].reshape(x.shape)


@cache
def _even_rows(rows: int, width: int, threads: int) -> int:
    """The fewest rows, at least `rows`, that PyTorch splits among threads at whole vectors."""
    for total in itertools.count(rows):
        numbers = total * width
        parts = {min(threads, -(-numbers // GRAIN)), threads if numbers > GELU_GRAIN else 1}
        if all(-(-numbers // of) % VECTORS == 0 for of in parts):
            return total
    raise AssertionError("a multiple of the threads is always one")


def align_activations(model: nn.Module) -> int:
    """Replaces the `forward` of every activation module of `model` by an `Aligned`. Returns their
    number."""
    aligned = 0
    for module in model.modules():
        if type(module).__module__.startswith(("transformers.activations", "torch.nn.modules.act")):
            module.forward = Aligned(module)
            aligned += 1
    return aligned
