"""Makes transformers' step of Mamba-2 for one token equal to its pass over a text.

In the models of `MIXERS`, the pass bounds the time step softplus(dt + dt_bias) from below by
`time_step_limit`, and the step does not. Inside `bounded_steps` dt + dt_bias is bounded before the
softplus, which is the same bound. Remove this module when transformers passes `dt_limit` to
`mamba2_selective_state_update` (5.19 does not).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

MIXERS = ("NemotronHMamba2Mixer", "Zamba2MambaMixer")
_BOUNDED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


@contextmanager
def bounded_steps(model: nn.Module) -> Iterator[None]:
    """Bounds the time steps of the passes over one token inside the context."""
    if model not in _BOUNDED:
        mixers: list[Any] = [m for m in model.modules() if type(m).__name__ in MIXERS]
        _BOUNDED[model] = [mixer for mixer in mixers if mixer.time_step_limit[0] > 0]

    if not _BOUNDED[model]:
        yield
        return

    with ExitStack() as hooks:
        for mixer in _BOUNDED[model]:
            hooks.enter_context(_time_step_bound(mixer))
        yield


@contextmanager
def _time_step_bound(mixer: Any) -> Iterator[None]:
    def bound(layer: nn.Module, inputs: Any, projected: torch.Tensor) -> torch.Tensor:
        bias = mixer.dt_bias.to(projected.dtype)
        *others, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat([*others, dt.maximum(lowest - bias)], dim=-1)

    lowest = math.log(math.expm1(mixer.time_step_limit[0]))
    hook = mixer.in_proj.register_forward_hook(bound)  # of a LoRA layer, if it is one
    try:
        yield
    finally:
        hook.remove()
