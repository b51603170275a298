"""torch's settings of the thread that computes: those of a fresh thread, independent of settings
that a user's code has left.

An agent that awaits the policy inside of `with torch.no_grad()` turns gradients off for all code
that shares its thread, and two such agents end each other's blocks in the wrong order. AgentEvo's
own computation does not depend on these settings, and the settings of the user's code are restored
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from agentevo.devices import autocasting

_CPU = torch.device("cpu")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Gradients on, no inference mode, no autocast, and tensors made on the CPU by default. For
    code without `await`."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in autocasting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        yield
