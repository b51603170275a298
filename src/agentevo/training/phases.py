"""Marks the current part of a step in a profile.

A phase is a `torch.profiler.record_function` span. Without a profiler on this thread it costs one
check and nothing else; with one on a GPU both ends wait for the device, so that the span holds the
work and not only its launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentevo.observability.profile_table import PREFIX
from agentevo.runtime.devices import synchronize_started


@contextmanager
def phase(name: str) -> Iterator[None]:
    """For `with` and as a decorator. Phases may be nested: time and memory count for the
    innermost."""
    if not torch.autograd._profiler_enabled():
        yield
        return
    synchronize_started()
    with torch.profiler.record_function(PREFIX + name):
        yield
        synchronize_started()
