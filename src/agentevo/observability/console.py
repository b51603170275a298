"""What a process of a run tells people while it works, beside any view: lines with the time, on
stderr."""

from __future__ import annotations

import sys
import time


def to_stderr(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
