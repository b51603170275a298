"""The threads that PyTorch computes with on a CPU, and settings of OpenMP that spoil them.

PyTorch's products are wrong there, without an error, where OpenMP starts fewer threads than it was
asked for: oneDNN leaves out what the missing ones would have computed. OMP_THREAD_LIMIT,
OMP_MAX_ACTIVE_LEVELS and OMP_DYNAMIC (OpenMP 5.2, chapter 21) allow OpenMP that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from agentevo.errors import ModelError


def missing_threads(count: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why OpenMP may start fewer than `count` threads, and what to do; None where it starts all."""
    found = {name: value.strip().lower() for name, value in environment.items() if "OMP_" in name}
    limit, levels = found.get("OMP_THREAD_LIMIT", ""), found.get("OMP_MAX_ACTIVE_LEVELS", "")
    if found.get("OMP_DYNAMIC") in ("true", "1", "yes", "on"):
        return f"OMP_DYNAMIC={found['OMP_DYNAMIC']}: unset it"
    if limit.removeprefix("+").isdecimal() and 0 < int(limit) < count:
        return f"OMP_THREAD_LIMIT={limit}: unset it, or set OMP_NUM_THREADS={int(limit)} too"
    if levels.removeprefix("+").isdecimal() and int(levels) == 0 and count > 1:
        return f"OMP_MAX_ACTIVE_LEVELS={levels}: unset it, or set OMP_NUM_THREADS=1 too"
    return None


def check_threads(num_threads: int) -> None:
    """Raises ModelError where PyTorch has more threads, `num_threads`, than OpenMP starts. Setting
    its number lower would not do: a thread that begins later asks for OpenMP's own at first."""
    begun_with = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = int(begun_with) if begun_with.isdecimal() else cores or 1
    if why := missing_threads(max(count, num_threads)):
        raise ModelError(f"PyTorch's results on a CPU are wrong under {why}")
