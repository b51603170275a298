"""Peak memory of a part of this process, on Linux."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def resident_bytes(field: str) -> int:
    """`VmRSS`: resident now; `VmHWM`: the most that was."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def peak_bytes(part: Callable[[], object]) -> int:
    """Peak of resident memory during `part` above what was there before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = resident_bytes("VmRSS")
    part()
    return resident_bytes("VmHWM") - before
