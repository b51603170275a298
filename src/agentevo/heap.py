"""Python's search for cyclic garbage, kept from what lives as long as the run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_within = 0
"""Blocks of this process that are under way, since one of them has frozen the heap."""


@contextmanager
def lasting_heap() -> Iterator[None]:
    """A block in which all that is there at its beginning is taken to live to its end.

    The half million objects of torch and transformers are searched for garbage each time that
    Python looks at all, 0.2 to 0.4 s in which nobody plays; here they aren't, but for once at the
    beginning, so it is for work that takes minutes (benchmarks/heap.py). What becomes cyclic
    garbage of them within the block is freed after it, and after the last of several that overlap.
    Where somebody else has frozen the heap already, nothing is changed.
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
