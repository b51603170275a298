"""The dashboard yields to training: its threads have a lower priority, while what it starts for
others keeps the ordinary one.

On Linux a thread inherits its priority from the thread that starts it, and so does a process; only
root may raise one again. So a thread that is there before keeps the priority, and starts runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Priority:
    """See the module. `nice`: by how much it is lowered from here on, 0 to 19; made by the main
    thread, before others are."""

    def __init__(self, nice: int = 0) -> None:
        self._ordinary = ThreadPoolExecutor(1, thread_name_prefix="agentevo-ordinary")
        self._ordinary.submit(lambda: None).result()  # its thread is there now
        if nice:
            os.nice(nice)

    async def ordinarily(self, function: Callable[[], T]) -> T:
        """Calls it with the priority that there was before. The caller sets the deadline."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._ordinary, partial(function))

    def close(self) -> None:
        """Ends its thread, once that has nothing to do."""
        self._ordinary.shutdown(wait=False)
