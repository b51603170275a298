"""Messages of a run's process for people, beside any view: lines with the time, on stderr."""

from __future__ import annotations

import sys
import time
from contextlib import suppress


def to_stderr(line: str) -> None:
    """Says it, unless whoever read it is gone: that ends nothing."""
    with suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
