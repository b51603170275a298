"""A script of a test in several processes at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence


def run_processes(script: str, arguments: Iterable[Sequence[object]], *, within_s: float) -> None:
    """One process for each of `arguments`. Fails with what the first that failed has said."""
    processes = [
        subprocess.Popen(
            [sys.executable, script, *map(str, of_one)], stderr=subprocess.PIPE, text=True
        )
        for of_one in arguments
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=within_s)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
