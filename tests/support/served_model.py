"""`agentevo serve --openai` while a test asks it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentevo.config import RunConfig
from agentevo.runs.processes.serve_model import serve_model

T = TypeVar("T")


def served(config: RunConfig, work: Callable[[str, str], T], **options: Any) -> T:
    """What `work(base URL, key)` returns, done in a thread while this one serves."""
    results = []
    notes = []
    started = threading.Event()

    def note(line):
        notes.append(line)
        started.set()

    def meet():
        if not started.wait(300):
            return

        try:
            (base,) = re.findall(r" at (http\S+)", notes[0])
            key = (config.run_dir / "serving" / "secret").read_text().strip()
            results.append(work(base, key))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=meet)
    client.start()
    try:
        serve_model(config, note=note, **options)
    finally:
        client.join(300)

    key = (config.run_dir / "serving" / "secret").read_text().strip()
    assert not any(key in line for line in notes)
    return results[0]
