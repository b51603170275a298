"""AdamW whose two moments take 8 bits a number (Dettmers et al., arXiv 2110.02861), by torchao.
Only this module imports torchao."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from agentevo.runtime.extras import load_extra


def adamw_8bit(
    groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments over groups of float32 parameters. Tensors of fewer than 4096
    numbers keep float32 moments. Raises MissingExtraError."""
    optimizer: torch.optim.Optimizer = _optimizer_class()(groups, lr=lr, betas=betas)
    return optimizer


def check_8bit() -> None:
    """Raises MissingExtraError without torchao."""
    _optimizer_class()


def step_8bit(optimizer: torch.optim.Optimizer) -> None:
    """Makes one optimizer step. torchao compiles its arithmetic once per shape of parameter; on a
    CPU it runs uncompiled, which needs no compiler."""
    on_cpu = any(
        parameter.device.type == "cpu"
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        optimizer.step()


def _optimizer_class() -> Callable[..., torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its compiled extensions, which are not needed here
        module = load_extra("torchao.optim", "8bit", "memory.optimizer=adamw_8bit")
    optimizer: Callable[..., torch.optim.Optimizer] = module.AdamW8bit
    return optimizer
