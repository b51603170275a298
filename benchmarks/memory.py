"""Peak memory of a part of this process, on Linux. Standard library only: peers' workers use it
too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def resident_bytes(field: str) -> int:
    """`VmRSS`: resident now; `VmHWM`: the most that was."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return 1024 * int(line.split()[1])


def reset_peak() -> int:
    """The peak starts again from what is resident now, which is returned."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def peak_bytes(part: Callable[[], object]) -> int:
    """Peak of resident memory during `part` above what was there before."""
    before = reset_peak()
    part()
    return resident_bytes("VmHWM") - before
