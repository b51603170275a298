"""Excludes objects that live as long as the run from Python's search for cyclic garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_within = 0
"""The number of this process's open blocks, where the first block has frozen the heap."""


@contextmanager
def lasting_heap() -> Iterator[None]:
    """A block in which all objects that exist at its beginning are assumed to live to its end.

    Each collection of Python's garbage collector searches the half million objects of torch and
    transformers, 0.2 to 0.4 s in which no attempt plays; within this block it searches them only
    once, at the beginning, so the block is for work that takes minutes (benchmarks/heap.py). Cyclic
    garbage among them that arises within the block is freed after it, and after the last of several
    blocks that overlap. If other code has already frozen the heap, the block changes nothing.
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
