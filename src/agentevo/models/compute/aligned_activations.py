"""Activation functions that compute every value by the same instructions at every position.

On a CPU, PyTorch computes functions like SiLU and GELU in vector registers. The
remainder at the end of a tensor, or of a thread's part, is computed by other instructions, whose
results differ in the last digits. A row's values would then depend on the row's position in the
batch. `Aligned` pads with zeros so that there is no remainder.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

VECTOR_MULTIPLE = 64
"""A multiple of the length of one iteration of PyTorch's vector loops, in values."""
GRAIN = 32768
"""at::internal::GRAIN_SIZE: the minimum number of values that PyTorch gives each thread."""
GELU_GRAIN = 16384
"""The number of values beyond which PyTorch splits GELU among all threads."""


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
        padding = -width % VECTOR_MULTIPLE
        total_rows = _even_rows(num_rows, width + padding, torch.get_num_threads())
        if not padding and total_rows == num_rows:
            return function(self.module, x)

        padded = pad(rows, (0, padding, 0, total_rows - num_rows))
        return function(self.module, padded)[:num_rows, :width].reshape(x.shape)


@cache
def _even_rows(rows: int, width: int, threads: int) -> int:
    """The fewest rows, at least `rows`, that PyTorch splits among threads at whole vectors."""
    for total_rows in itertools.count(rows):
        num_values = total_rows * width
        possible_parts = {
            min(threads, -(-num_values // GRAIN)),
            threads if num_values > GELU_GRAIN else 1,
        }
        if all(-(-num_values // num_parts) % VECTOR_MULTIPLE == 0 for num_parts in possible_parts):
            return total_rows
    raise AssertionError("unreachable: some number of rows always splits at whole vectors")


def align_activations(model: nn.Module) -> int:
    """Replaces the `forward` of every activation module of `model` by an `Aligned`. Returns
    the number of replaced modules."""
    num_replaced = 0
    for module in model.modules():
        if type(module).__module__.startswith(("transformers.activations", "torch.nn.modules.act")):
            module.forward = Aligned(module)
            num_replaced += 1
    return num_replaced
