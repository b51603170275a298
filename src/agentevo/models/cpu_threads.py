"""The threads that PyTorch computes with on a CPU, and two settings of OpenMP that spoil them.

PyTorch's products are wrong there, without an error, where OpenMP starts fewer threads than it was
asked for: oneDNN leaves out what the missing ones would have computed. OMP_THREAD_LIMIT and
OMP_DYNAMIC (OpenMP 5.2, chapter 21) allow OpenMP that.
"""

from __future__ import annotations

import os

import torch

from agentevo.errors import ModelError

DYNAMIC, LIMIT = "OMP_DYNAMIC", "OMP_THREAD_LIMIT"


def is_dynamic() -> bool:
    """Whether OpenMP decides anew each time how many threads it starts."""
    return os.environ.get(DYNAMIC, "").strip().lower() in ("true", "1", "yes", "on")


def threads_in_use() -> int:
    """PyTorch's threads, or as many as OMP_THREAD_LIMIT allows."""
    limit = os.environ.get(LIMIT, "").strip()
    wanted = torch.get_num_threads()
    return min(wanted, int(limit)) if limit.isdecimal() and int(limit) else wanted


def settle_threads() -> None:
    """Lowers PyTorch's threads to those that OpenMP starts. Raises ModelError under OMP_DYNAMIC,
    where nobody knows how many those are."""
    if is_dynamic():
        raise ModelError(
            f"{DYNAMIC}={os.environ[DYNAMIC]} is set, and PyTorch's results on a CPU are wrong "
            f"where OpenMP starts fewer threads than it is asked for: unset {DYNAMIC}"
        )
    if (count := threads_in_use()) < torch.get_num_threads():
        torch.set_num_threads(count)
