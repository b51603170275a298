"""Whether a command has failed because no memory is left, and the message: under a limit of
the address space (`ulimit -v`) it is an import, a thread or any line that fails."""

from __future__ import annotations

import errno
import resource

_WORDS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
)
"""What the loader of libraries, torch and Python say of it, in small letters."""


def memory_problem(error: BaseException | None) -> str:
    """What to say of an error that came of memory that ran out; empty for any other."""
    while error is not None:
        text = str(error)
        is_memory = isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno == errno.ENOMEM
        )
        if is_memory or any(words in text.lower() for words in _WORDS):
            kind = type(error).__name__
            description = f"{kind}: {text.splitlines()[0]}" if text else kind
            return f"memory has run out ({description}): {_remedy()}"
        error = error.__cause__ or error.__context__
    return ""


def _remedy() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return "free some, or use a machine with more"
    return f"the process may take {limit >> 20:,} MiB (`ulimit -v`): allow it more"
