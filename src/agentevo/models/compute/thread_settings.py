"""Sets torch's settings of the computing thread to those of a fresh thread, whatever settings a
user's code has left.

If an agent awaits the policy inside `with torch.no_grad()`, gradients are off for all code in the
same thread. Two such agents may also end their blocks in the wrong order. AgentEvo's own
computation does not depend on these settings, and the settings of the user's code are restored
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from agentevo.runtime.devices import autocasting

_CPU = torch.device("cpu")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """While the context is open: gradients on, no inference mode, no autocast, and the CPU as the
    default device. For code without `await`."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # also turns gradients on
        for kind in autocasting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        yield
