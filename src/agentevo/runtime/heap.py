"""Excludes objects that live as long as the run from Python's search for cyclic garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_within = 0
"""The number of open blocks in this process. The first block has frozen the heap."""


@contextmanager
def lasting_heap() -> Iterator[None]:
    """A block that assumes that all objects existing at its start live to its end.

    Each full collection of Python's garbage collector searches the half million objects of torch
    and transformers. That takes 0.2 to 0.4 s, in which no attempt plays. Within this block the
    collector searches them only once, at the start, so the block is for work that takes minutes
    (benchmarks/heap.py). Cyclic garbage among these objects is freed after the block. If several
    blocks overlap, after the last one. If other code has already frozen the heap, the block changes
    nothing.
    """
    global _num_within
    with _lock:
        is_ours = _num_within > 0 or not gc.get_freeze_count()
        if is_ours and not _num_within:
            gc.collect()
            gc.freeze()
        _num_within += is_ours

    try:
        yield
    finally:
        with _lock:
            _num_within -= is_ours
            if is_ours and not _num_within:
                gc.unfreeze()
