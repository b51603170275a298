"""The threads that a process may compute with on a CPU, and settings of OpenMP that make results
wrong.

PyTorch's products are wrong, without an error, if OpenMP starts fewer threads than requested:
oneDNN then leaves out the missing threads' share. OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS and
OMP_DYNAMIC (OpenMP 5.2, chapter 21) allow OpenMP to do that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from agentevo.errors import ModelError


def allowed_cpus() -> int:
    """The number of logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_threads(num_threads: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why OpenMP may start fewer threads than PyTorch requests, and the remedy. None if it starts
    all of them. `num_threads` is PyTorch's number. A lower number is not a remedy, because a thread
    that starts later first requests OpenMP's own number."""
    omp_variables = {
        name: value.strip().lower() for name, value in environment.items() if "OMP_" in name
    }
    omp_threads = _number(omp_variables.get("OMP_NUM_THREADS", "").partition(",")[0])
    count = max(num_threads, omp_threads or allowed_cpus())
    limit = _number(omp_variables.get("OMP_THREAD_LIMIT"))
    levels = omp_variables.get("OMP_MAX_ACTIVE_LEVELS")

    if omp_variables.get("OMP_DYNAMIC") in ("true", "1", "yes", "on"):
        return f"OMP_DYNAMIC={omp_variables['OMP_DYNAMIC']}: unset it"
    if limit and limit < count:
        return f"OMP_THREAD_LIMIT={limit}: unset it, or set OMP_NUM_THREADS={limit} too"
    if _number(levels) == 0 and count > 1:
        return "OMP_MAX_ACTIVE_LEVELS=0: unset it, or set OMP_NUM_THREADS=1 too"

    return None


def _number(text: str | None) -> int | None:
    """None for a value that OpenMP also ignores."""
    digits = (text or "").strip().removeprefix("+")
    return int(digits) if digits.isdecimal() else None


def check_threads(num_threads: int) -> None:
    """Raises ModelError if `missing_threads` returns a reason."""
    if why := missing_threads(num_threads):
        raise ModelError(f"PyTorch's results on a CPU are wrong under {why}")
