"""What is done to a cell of products of the output layer (linear_logprobs.py), each as one kernel
that PyTorch's compiler makes, on devices that it makes kernels for.

A GPU computes the softmax of a cell as fast as it reads and writes it, so operations one after the
other cost a pass over memory each: about ten of four bytes a number, where here it is one of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def absorbed(
    products: torch.Tensor,
    slope: float,
    top: torch.Tensor,
    total: torch.Tensor,
    moment: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Running sums [R] over a row's scores, slope * products [R, C], as `_Sums` has them, with this
    cell's; float32."""
    scores = products.float() * slope
    highest = torch.maximum(top, scores.amax(1))
    below = scores - highest.unsqueeze(1)
    weights = below.exp()
    fall = top - highest
    fade = fall.exp()
    moment = (moment + total * fall) * fade + (below * weights).sum(1)
    return highest, total * fade + weights.sum(1), moment


def slopes(
    products: torch.Tensor,
    slope: float,
    top: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    of_row: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient in the products [R, C] but for what the targets have of their own, given that
    in a row's log-probs and entropy [R]; float32. See `_Slopes`."""
    below = products.float() * slope - top.unsqueeze(1)
    shares = below.exp() / total.unsqueeze(1)
    if of_entropy is None:
        return shares * -of_row.unsqueeze(1)
    further = (below - mean.unsqueeze(1)) * of_entropy.unsqueeze(1)
    return -shares * (further + of_row.unsqueeze(1))


def rounded_slopes(products: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The same in the products' dtype."""
    return slopes(products, *rest).to(products.dtype)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for cells of any size."""
    made: Callable[..., Any] = torch.compile(function, dynamic=True)
    return made
