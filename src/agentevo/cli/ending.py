"""The end of the command's process, whatever a user's code has left running.

Python waits at its end for threads that are no daemons, for processes of `multiprocessing`, and for
what was registered with `atexit`. That is right for what ends, such as a tracker that still sends;
what does not is left behind.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from agentevo.runtime.console import to_stderr

ENDING_S = 5.0
"""How long Python may take to end."""


def end_soon(code: int) -> None:
    """Ends the process with this exit code if it has not ended by itself within ENDING_S."""
    timer = threading.Timer(ENDING_S, _leave, (code,))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    names = [
        f"the thread {thread.name}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]
    multiprocessing = sys.modules.get("multiprocessing")
    with suppress(Exception):
        for child in multiprocessing.active_children() if multiprocessing is not None else ():
            names.append(f"the process {child.pid}")
            child.kill()

    with suppress(Exception):
        to_stderr(
            f"the command is done, but {', '.join(names[:5]) or 'something'} that the run's code "
            f"started still ran {ENDING_S:g} s later: it ends with the process"
        )

    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()

    os._exit(code)
