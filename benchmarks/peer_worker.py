"""The peer's end of the benchmark's line protocol; runs in a peer's virtual environment, so it
imports nothing of AgentEvo.

A worker loads its system once, prints one JSON line that describes it, then answers each JSON line
on standard input with one JSON line. Keeping the workers alive lets the harness take turns between
them, so that a slow minute of the machine falls on everybody.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Line:
    """Standard output kept for the protocol alone: whatever a library prints goes to standard error
    instead."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def requests(self, description: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Says that the worker is ready, then yields requests until standard input closes."""
        self.reply(description)
        for line in sys.stdin:
            yield json.loads(line)

    def reply(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()
